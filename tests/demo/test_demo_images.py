"""`tinsmith demo --images`: its pictures, the model that is in the package, what a short training
shows beside its controls, and what is said of the figures."""

import gzip
import io
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinsmith
from PIL import Image
from tinsmith.cli import commands
from tinsmith.demo import classroom, fashion, seeing, seeing_picture
from tinsmith.demo.classroom import Answers, Classroom, Lesson
from tinsmith.demo.fashion import KNOWN, NAMES, NEW, TEST, TRAIN, Pictures

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


# ---- pictures ----


def rows_of(file: Path, offset: int, width: int) -> list[bytes]:
    """The rows of one of the data set's files."""
    content = gzip.decompress(file.read_bytes())[offset:]
    return [content[place : place + width] for place in range(0, len(content), width)]


@pytest.mark.parametrize(
    ("side", "wanted"),
    [
        (TRAIN, dict.fromkeys((0, 2, 4, 6, 7), 240)),
        (TEST, dict.fromkeys((0, 2, 4, 6, 7), 80) | dict.fromkeys((1, 3, 5, 8, 9), 40)),
    ],
)
def test_the_package_has_so_many_pictures_of_each_label(side: str, wanted: dict[int, int]) -> None:
    labels = rows_of(fashion.FOLDER / f"{side}-labels-idx1-ubyte.gz", 8, 1)
    images = rows_of(fashion.FOLDER / f"{side}-images-idx3-ubyte.gz", 16, 28 * 28)
    assert Counter(label[0] for label in labels) == wanted
    assert len(images) == len(labels) == len(set(images)), "no picture is there twice"
    pictures = fashion.read(side)
    assert [one.tobytes() for one in pictures.pixels] == images
    assert [bytes([label]) for label in pictures.labels] == labels
    files = pictures.take([0, 5]).files()
    for file, pixels in zip(files, pictures.pixels[[0, 5]], strict=True):
        assert file.startswith(b"\x89PNG")
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(file))), pixels)


def test_no_held_out_picture_is_trained_on() -> None:
    train, test = fashion.read(TRAIN), fashion.read(TEST)
    assert not {one.tobytes() for one in train.pixels} & {one.tobytes() for one in test.pixels}
    assert set(train.names) == set(NEW) and set(test.names) == set(NAMES)
    assert set(NEW) | set(KNOWN) == set(NAMES) and len(NEW) == len(KNOWN) == 5


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Debian's dataset-fashion-mnist")
@pytest.mark.parametrize("side", (TRAIN, TEST))
def test_the_pictures_and_their_labels_are_the_data_sets(side: str) -> None:
    labels = rows_of(DEBIAN / f"{side}-labels-idx1-ubyte.gz", 8, 1)
    images = rows_of(DEBIAN / f"{side}-images-idx3-ubyte.gz", 16, 28 * 28)
    whole = dict(zip(images, labels, strict=True))
    pictures = fashion.read(side)
    for pixels, label in zip(pictures.pixels, pictures.labels, strict=True):
        assert whole[pixels.tobytes()] == bytes([label])


def test_a_selection_is_the_first_of_each_class(tmp_path, monkeypatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 28, 28), np.uint8)
    whole = Pictures(pixels, np.arange(40, dtype=np.uint8) % 10)
    source, out = tmp_path / "source", tmp_path / "out"
    for folder in (source, out):
        folder.mkdir()
    for side in (TRAIN, TEST):
        fashion.write(side, whole, source)
    monkeypatch.setattr(fashion, "SELECTED", {TRAIN: {"coat": 2}, TEST: {"bag": 1, "dress": 3}})
    fashion.select(source, out)
    np.testing.assert_array_equal(fashion.read(TRAIN, out).pixels, pixels[[4, 14]])
    np.testing.assert_array_equal(fashion.read(TEST, out).labels, [3, 8, 3, 3])
    before = {file: file.read_bytes() for file in out.iterdir()}
    fashion.select(source, out)
    assert before == {file: file.read_bytes() for file in out.iterdir()}


def test_damaged_files_are_told_by_name(tmp_path: Path) -> None:
    whole = Pictures(np.zeros((3, 28, 28), np.uint8), np.zeros(3, np.uint8))
    fashion.write(TEST, whole, tmp_path)
    labels, images = sorted(tmp_path.iterdir(), reverse=True)[:2]
    labels, images = (labels, images) if "labels" in labels.name else (images, labels)
    labels.write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x02ab"))
    with pytest.raises(ValueError, match=r"t10k-labels\S+ should have 3 labels"):
        fashion.read(TEST, tmp_path)
    images.write_bytes(gzip.compress(b"\0\0\x08\x03" + b"\0\0\0\x20" * 3))
    with pytest.raises(ValueError, match=r"t10k-images\S+ should have pictures of 28 × 28 bytes"):
        fashion.read(TEST, tmp_path)


def test_the_recipes_data_set_has_the_new_classes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    place = fashion.write_dataset(tmp_path)
    assert place == tmp_path / "dpdl-benchmark" / "caltech101"
    found = datasets.load_dataset(str(place), cache_dir=str(tmp_path / "cache"))
    assert {side: len(rows) for side, rows in found.items()} == {"train": 1200, "test": 400}
    row, test = found["test"][7], fashion.read(TEST).of(NEW)
    assert found["test"].features["label"].int2str(row["label"]) == test.names[7]
    np.testing.assert_array_equal(np.asarray(row["image"]), test.pixels[7])


# ---- the model ----


@pytest.fixture(scope="module")
def model() -> Iterator[tinsmith.Model]:
    with tinsmith.Model(classroom.MODEL, device="cpu", threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def room(model: tinsmith.Model) -> Classroom:
    """Half of the training pictures, 12 steps of them, and 24 of each class to ask for."""
    test = fashion.read(TEST)
    places = [np.flatnonzero(np.array(test.names) == name)[:24] for name in NAMES]
    train = fashion.read(TRAIN)
    return Classroom(model, train.take(range(0, 1152, 2)), test.take(np.concatenate(places)))


def test_the_model_knows_five_classes_and_has_words_for_the_others(room, model) -> None:
    before = room.ask(None, NAMES)
    assert before.share(KNOWN) > 0.9 and before.share(NEW) == 0
    assert set(before.said) <= {*KNOWN}, "it answers with a name that it knows"
    prompts = [f"<|im_start|>user\nSay {name}.{classroom.prompt_texts('')[1][12:]}" for name in NEW]
    said = [model.tokenizer.decode(one.tokens) for [one] in model.sampler().sample(
        prompts, max_tokens=classroom.MAX_TOKENS, temperature=0.0)]  # fmt: skip
    assert said == [classroom.answer_text(name) for name in NEW]


def test_a_datum_is_the_cookbooks(room: Classroom) -> None:
    """Its renderer makes the same tokens, with the loss on the same ones, and counts a picture's
    tokens as we do; and so does the model's chat template."""
    from tinker_cookbook.image_processing_utils import get_image_processor
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    path, name = str(classroom.MODEL), room.train.names[3]
    tokenizer = get_tokenizer(path)
    renderer = get_renderer("qwen3_5_disable_thinking", tokenizer, get_image_processor(path))
    picture = Image.fromarray(room.train.pixels[3])
    asked: Any = [{"type": "image", "image": picture}, {"type": "text", "text": classroom.QUESTION}]
    answer = classroom.answer_text(name).removesuffix("<|im_end|>")
    messages: Any = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    given, weights = renderer.build_supervised_example(messages)
    parts, targets, ours = room.datum(3, name)
    tokens = [int(part) if isinstance(part, int) else None for part in parts]
    wanted: list[int | None] = []
    for chunk in given.chunks:
        wanted += [None] if chunk.type == "image" else list(chunk.tokens)
        assert chunk.type != "image" or chunk.length == 4 == len(parts[len(room.before)])
    assert [*tokens, int(targets[-1])] == wanted
    assert ours.tolist() == weights.tolist()[1:]
    text = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert text == "<|image_pad|>".join(classroom.prompt_texts(classroom.QUESTION))


@pytest.fixture(scope="module")
def lessons(room: Classroom) -> tuple[Lesson, Lesson]:
    """Three epochs of 12 steps, with the pictures' names and with others'."""
    names = room.train.names
    turned = [*names[1:], names[0]]  # neighbours in the data set have nothing in common
    lesson, control = (room.teach(given, 36, 5e-3, seed=1) for given in (names, turned))
    return lesson, control


def test_what_is_learned_comes_from_the_pictures(lessons: tuple[Lesson, Lesson]) -> None:
    lesson, control = lessons
    assert lesson.shares[0] == control.shares[0] == 0
    assert lesson.answers.share(NEW) == lesson.shares[-1] > 0.45
    assert control.answers.share(NEW) < 0.3
    assert lesson.answers.dealt(0).share(NEW) < 0.3
    assert len(lesson.losses) == len(control.losses) == 36
    assert lesson.losses[-1] < control.losses[-1] < control.losses[0]


def test_a_picture_is_seen_once_and_its_answers_are_scored_as_they_were_drawn(
    room: Classroom, lessons: tuple[Lesson, Lesson]
) -> None:
    lesson, control = lessons
    assert len(lesson.seen) == len(lesson.shares) - 1 == 3
    assert lesson.seen[1:] == [0, 0] and control.seen == [0, 0, 0]
    difference, tokens = room.difference(lesson.adapter, seed=2)
    assert difference == 0 and tokens > 100


def test_the_same_seed_makes_the_same_lesson(room: Classroom) -> None:
    first, again, other = (room.teach(room.train.names, 3, 5e-3, seed) for seed in (5, 5, 6))
    assert first.losses == again.losses != other.losses
    assert first.answers == again.answers


# ---- what is said of the figures ----


def answers(said: dict[str, str]) -> Answers:
    """Two pictures of each class: one is named as `said` says, the other right."""
    return Answers([word for name in NAMES for word in (said.get(name, name), name)],
                   [name for name in NAMES for _ in range(2)])  # fmt: skip


def lesson_of(found: Answers, losses: list[float], seen: list[int]) -> Lesson:
    nothing: Any = None
    return Lesson(nothing, losses, [0.0, found.share(NEW)], found, seen)


def test_a_share_counts_the_pictures_of_its_classes() -> None:
    found = answers({"coat": "shirt", "bag": "coat"})
    assert found.share(NAMES) == 0.9 and found.share(NEW) == 0.9
    assert found.share(["coat"]) == 0.5 and found.share(["shirt", "sneaker"]) == 1
    dealt = found.dealt(3)
    assert Counter(dealt.said) == Counter(found.said) and dealt.names == found.names
    assert dealt.said != found.said


def test_the_report_has_each_class_both_controls_and_the_counts() -> None:
    before = answers(dict.fromkeys(NEW, "bag"))
    lesson = lesson_of(answers({"coat": "shirt"}), [9.0, 1.25], [1200, 7, 3])
    control = lesson_of(answers(dict.fromkeys(NAMES, "shirt")), [9.5, 4.5], [0])
    told = seeing.report(before, lesson, control, (0.0, 321), seed=0)
    rows = {re.sub(r" {2,}.*", "", line): line.split()[-3:] for line in told if "%" in line}
    assert rows["coat"] == ["50%", "50%", "50%"] and rows["sneaker"] == ["50%", "100%", "50%"]
    assert rows["the new classes"] == ["50%", "90%", "60%"]
    assert rows["the classes it knew"] == ["100%", "100%", "50%"]
    text = "\n".join(told)
    assert "Guessing is 20%." in text
    assert "9.00 to 1.25; shuffled 9.50 to 4.50." in text
    assert "at most 0.0 nats over 321 tokens" in text
    assert "1200 in the first epoch, 10 in the 2 others" in text


def test_the_picture_shows_the_first_of_each_class() -> None:
    test = fashion.read(TEST)
    places = seeing_picture.shown(test)
    assert [test.names[place] for place in places] == [*NEW, *NEW, *NEW, *KNOWN]
    for row in range(3):
        for name, place in zip(NEW, places[5 * row : 5 * row + 5], strict=True):
            assert test.names[:place].count(name) == row


# ---- the command ----


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--real",), "--real and --images are two demonstrations"),
        (("--lr", "1e-3,5e-3"), "--images takes one learning rate; --lr has 2"),
        (("--own-notation",), "--own-notation is for tool calls"),
        (("--seeds", "2"), "--seeds is for --real"),
    ],
)
def test_options_of_the_other_demonstrations_are_refused(
    options: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["demo", "--images", *options]) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"tinsmith: {sentence}")


def test_without_pillow_it_says_how_to_get_it(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert commands.main(["demo", "--images", "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("tinsmith: the demo needs PIL: pip install ") and "images" in told
    assert not (tmp_path / "out").exists()


def test_all_of_it(monkeypatch, capsys, tmp_path: Path) -> None:
    def few(side: str, read: Any = fashion.read) -> Pictures:
        return read(side).take(range(0, {TRAIN: 1152, TEST: 600}[side], 6))

    monkeypatch.setattr(fashion, "read", few)
    monkeypatch.setattr(seeing_picture, "shown", lambda test: list(range(20)))
    arguments = {"device": "cpu", "threads": 1, "seed": 3, "steps": 5, "lr": [5e-3]}
    seeing.run(Namespace(out=tmp_path / "out", **arguments))
    told = capsys.readouterr().out
    assert told.startswith("The model was made for this demonstration: ")
    assert "from 192 real pictures" in told and "192 in the first epoch, 0 in the 1 others" in told
    assert Image.open(tmp_path / "out" / "images.png").size > (1000, 500)
