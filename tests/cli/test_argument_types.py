"""The command line's options: each bad value is refused with a sentence, before any work."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
from tinsmith.cli import argument_types, commands
from tinsmith.demo import demo

MODEL = str(demo.MODEL)
NUMBERS = ("", "x", "nan", "1.5", "1e3")
MEMORY = ("nonsense", "0", "-5", "G", "inf", "nan", "")
# What no command may take for an option, whichever has it.
BAD = {
    "--port": (*NUMBERS, "-1", "65536", "99999"),
    "--memory": MEMORY,
    "--checkpoints-max": MEMORY,
    "--step-memory": MEMORY,
    "--device": ("tpu", ""),
    "--dtype": ("int8", ""),
    "--weights": ("int3", "", "INT4"),
    "--image": ("", "/nowhere/photo.png", "/dev/null", "/"),
    "--image-tokens": (*NUMBERS, "0", "-1", "1048577"),
    "--threads": (*NUMBERS, "-1", "257"),
    "--stages": (*NUMBERS, "0", "-1", "17"),
    "--replicas": (*NUMBERS, "0", "-1", "65"),
    "--ray": ("", "head", "ray://head:10001", "head:", "head:x", "AUTO"),
    "--isa": ("sse9", "", "AVX2"),
    "--seed": NUMBERS,
    "--checkpoints": ("/dev/null", "/dev/null/below", ""),
    "--log-level": ("loud",),
    "--log-format": ("xml",),
    "--temperature": ("x", "nan", "inf", "-0.1", ""),
    "--top-p": ("x", "nan", "0", "1.1", "-1"),
    "--max-tokens": (*NUMBERS, "0", "-5"),
    "-n": (*NUMBERS, "0", "65537"),
    "--tokens": (*NUMBERS, "-5", "99999999999999999999"),
    "--rank": (*NUMBERS, "0", "4097"),
    "--older-than": ("", "x", "d", "30", "nand", "infd", "-1d", "0d", "30 x", "1e30d"),
    "--keep": (*NUMBERS, "0", "-1"),
    "--steps": (*NUMBERS, "0", "-1", "9999999999"),
    "--batch": (*NUMBERS, "0", "-1", "5000"),
    "--seeds": (*NUMBERS, "0", "31"),
    "--hold-out": (*NUMBERS, "0", "-1"),
    "--methods": ("", "dpo", "sft,", "sft,sft", "SFT"),
    "--lr": ("", "x", "nan", "inf", "0", "-1e-4", "2", "1e-4,", "1e-4,0.0001"),
    "--out": ("/dev/null",),
    "--demonstration": ("", "words,turn", "Turn"),
    "--type": ("q8_0", "BF16", ""),
}
# Those whose value is a name, which is looked for when the command runs; or any text.
NAMES = {"--host", "--api-key", "--api-key-file", "--allow-host", "--allow-origin", "--model"}
NAMES |= {"--adapter", "--system", "-m", "--run"}
NAMES |= {"--data", "--test", "--retain", "--renderer", "--scorer", "--set"}


TOP = commands.command_line()
[ROWS] = [a.choices for a in TOP._actions if isinstance(a, argparse._SubParsersAction)]
COMMANDS = {"": TOP, **ROWS}


def options(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a command that take a value."""
    return [a.option_strings[-1] for a in parser._actions if a.option_strings and a.nargs != 0]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_bad_value_is_refused_in_one_line(command, capsys) -> None:
    for option in set(options(COMMANDS[command])) - NAMES:
        for value in BAD[option]:
            assert (
                commands.main([command, f"{option}={value}" if option != "-n" else f"-n{value}"])
                == 2
            )
            told = capsys.readouterr().err
            wanted = f"tinsmith {command}: "
            assert told.startswith(wanted) and told.count("\n") == 1, told
            assert option in told and f"see tinsmith {command} --help" in told, told


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_ends_with_an_example(command, capsys) -> None:
    assert commands.main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().splitlines()[-1].startswith(f"  tinsmith {command}".rstrip()), shown
    assert "example" in shown
    for option in options(COMMANDS[command]):
        assert option in shown


def test_the_examples_are_command_lines() -> None:
    for command, parser in COMMANDS.items():
        title, *lines = (parser.epilog or "").splitlines()
        assert title in ("example:", "examples:") and len(lines) >= 1
        for line in lines:
            name, *given = shlex.split(re.split(r"[|<]", line)[0])
            assert name == "tinsmith" and given[0] == (command or given[0])
            assert TOP.parse_args(given).run is not None, line


@pytest.mark.parametrize("given", ("serve m --checkpoints --expire", "prune --run --yes"))
def test_the_next_option_is_no_value_that_was_forgotten(given: str, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands.main(given.split()) == 2
    assert f"{given.split()[-2]}: expected one argument" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("prompt", ("- one\n- two", "-5", "-"))
def test_a_prompt_may_begin_with_a_dash(prompt: str) -> None:
    assert TOP.parse_args(["sample", MODEL, prompt, "--seed", "-1"]).prompt == prompt


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("ls", "list"), ("ps", "list"), ("rm", "prune"), ("serv", "serve"), ("eval", "compare")],
)
def test_an_unknown_command_is_told_which_was_meant(given: str, wanted: str, capsys) -> None:
    assert commands.main([given]) == 2
    told = capsys.readouterr().err
    assert f"; did you mean {wanted}?; see tinsmith --help" in told and told.count("\n") == 1


def test_each_command_of_other_programs_leads_to_one_that_there_is() -> None:
    assert set(argument_types.COMMANDS.values()) <= ROWS.keys()
    assert not argument_types.COMMANDS.keys() & ROWS.keys()


def test_the_demo_refuses_more_steps_than_it_has_questions(capsys) -> None:
    assert commands.main(["demo", "--steps=3000"]) == 2
    assert "--steps: it should be" in capsys.readouterr().err


def test_no_command_is_a_question_and_an_unknown_one_a_mistake(capsys) -> None:
    assert commands.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: tinsmith")
    assert commands.main(["--version"]) == 0
    assert capsys.readouterr().out.split() in (
        ["tinsmith", "0.1.0"],
        ["tinsmith", "(not", "installed)"],
    )
    assert commands.main(["surf"]) == 2
    assert "'surf'" in (told := capsys.readouterr().err) and told.count("\n") == 1
    assert commands.main(["serve", "--surf"]) == 2
    assert "--surf" in (told := capsys.readouterr().err) and told.count("\n") == 1


def test_a_name_that_leads_nowhere_is_a_sentence(tmp_path: Path, capsys, monkeypatch) -> None:
    """Nothing is served, and nothing is left in the default folders."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    served = ["serve", f"m={MODEL}", "--port", "0", "--device", "cpu"]
    for arguments, wanted in (
        (["serve"], "there is no model to serve"),
        (["serve", "m="], "names no model"),
        (["serve", f"={MODEL}"], "names no model"),
        (["serve", f"m={MODEL}", "--model", f"m={MODEL}"], "the same name, 'm'"),
        (["serve", f"{tmp_path}"], "there is no model"),
        ([*served, "--host", "no.such.host.invalid"], "can't listen on no.such.host.invalid:0: "),
        ([*served, "--host", "0.0.0.0"], "without an API key"),
        ([*served, "--api-key", "short"], "the API key must begin with"),
        ([*served, "--api-key-file", "nothing"], "nothing: No such file"),
        ([*served, "--api-key-file", "key"], "the API key must begin with"),
        ([*served, "--allow-origin", "page"], "'page' came"),
        ([*served, "--memory", "5"], "the base model m needs"),
        (["run"], "say what to run"),
        (["run", "nothing.py"], "there is no script 'nothing.py'"),
        (["sample", MODEL, "x", "--device", "cpu", "--adapter", "nothing"], "nothing"),
        (["export", MODEL, "nothing", str(tmp_path / "out")], "no checkpoint at nothing"),
        (["export", MODEL, "tinker://a/weights/b", "out"], "there is no checkpoint tinker://a"),
        (["export", MODEL, "nothing", str(tmp_path)], "exists; choose another folder"),
    ):
        assert commands.main(arguments) == 1, arguments
        told = capsys.readouterr().err
        assert wanted in told.splitlines()[-1] and "Errno" not in told, told
    assert [path.name for path in Path().iterdir()] == ["key"]
