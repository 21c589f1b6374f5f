"""What says how a missing part is installed."""

import pytest
from tinsmith.server import clients
from tinsmith.system import install_hints


def test_a_server_without_ray_says_how_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir, tmp_path
) -> None:
    monkeypatch.setattr(install_hints, "find_spec", lambda name: None)
    options = {"checkpoints": tmp_path, "device": "cpu", "replicas": 2, "ray": "auto"}
    with pytest.raises(ImportError, match=r"--ray needs Ray: pip install .*\[ray\]"):
        clients.serve(tiny_model_dir, **options)
