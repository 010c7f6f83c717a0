"""Catches: documents that see each other, a tensor left uninitialised or ignored, FSDP that is not the plain model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from colchis.components.errors import BadConfig, BadData
from colchis.components.records.weights import weights_digest
from colchis.components.trainer.attention import document_runs
from colchis.components.trainer.model import load_model, local, published, shard
from colchis.components.trainer.state import write_weights
from colchis.components.weights.manifest import describe
from tests.trainer.cases import change_weights, equal_weights, make_model, plain_loss_gradients, weights_of

DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17], [18]]


def packed_logits(model: torch.nn.Module, documents: list[list[int]]) -> list[torch.Tensor]:
    ids = torch.tensor([[token for d in documents for token in d]])
    positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
    ends = torch.tensor([len(d) for d in documents]).cumsum(0).tolist()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, doc_ends=ends).logits[0]
    return list(logits.split([len(d) for d in documents]))


def test_packed_documents_do_not_see_each_other(base: Path) -> None:
    model = load_model(base)
    with torch.no_grad():
        before = packed_logits(model, DOCUMENTS)
        after = packed_logits(model, [[31, 30, 29, 28, 27], *DOCUMENTS[1:-1], [20]])
    for one, other in zip(before[1:-1], after[1:-1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert not torch.allclose(before[0], after[0], atol=1e-2)


def test_packed_documents_equal_transformers_one_at_a_time(base: Path) -> None:
    """The oracle is another attention, another loader and no packing."""
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    with torch.no_grad():
        for document, logits in zip(DOCUMENTS, packed_logits(load_model(base), DOCUMENTS), strict=True):
            torch.testing.assert_close(logits, plain(torch.tensor([document])).logits[0], rtol=1e-5, atol=1e-5)


def test_a_family_with_dropout_and_learned_positions(tmp_path: Path) -> None:
    """GPT-2: dropout would make every pass another, positions that run on would read other embeddings."""
    torch.manual_seed(0)
    options = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 32, "n_positions": 64, "initializer_range": 0.2}
    GPT2LMHeadModel(GPT2Config(**options)).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        for document, logits in zip(DOCUMENTS, packed_logits(load_model(tmp_path), DOCUMENTS), strict=True):
            torch.testing.assert_close(logits, plain(torch.tensor([document])).logits[0], rtol=1e-4, atol=1e-4)


def test_neighbours_of_equal_length_share_one_call() -> None:
    assert list(document_runs([5, 10, 13, 17, 18])) == [(2, 5), (1, 3), (1, 4), (1, 1)]


def test_a_forward_pass_without_document_ends_is_refused(base: Path) -> None:
    model = load_model(base)
    with pytest.raises(BadConfig, match="doc_ends"):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    with pytest.raises(BadConfig, match="end at 3 tokens"):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False, doc_ends=(2,))


def test_a_document_beyond_the_sliding_window_is_refused(tmp_path: Path) -> None:
    windowed = make_model(tmp_path, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    model = load_model(windowed)
    packed_logits(model, [[1, 2, 3, 4], [5, 6]])
    with pytest.raises(BadConfig, match="5 tokens exceeds the model's sliding window of 4"):
        packed_logits(model, DOCUMENTS)


def test_one_rank_of_fsdp_is_bitwise_the_plain_model(base: Path, alone: None) -> None:
    results = []
    for sharded in (False, True):
        model = load_model(base)
        if sharded:
            shard(model, dtype=torch.float32)
        logits = torch.cat(packed_logits(model, DOCUMENTS))
        logits.log_softmax(-1).square().mean().backward()
        gradients = {name: local(g) for name, g in plain_loss_gradients(model).items()}
        results.append((logits.detach(), gradients))
    (plain, plain_gradients), (fsdp, fsdp_gradients) = results
    assert torch.equal(plain, fsdp)
    assert plain_gradients.keys() == fsdp_gradients.keys()
    assert all(torch.equal(plain_gradients[name], fsdp_gradients[name]) for name in plain_gradients)


@pytest.mark.parametrize("tied", [True, False])
def test_published_names_are_those_of_the_checkpoint(tmp_path: Path, tied: bool) -> None:
    folder = make_model(tmp_path / "m", tie_word_embeddings=tied)
    stored = weights_of(folder)
    loaded = published(load_model(folder))
    assert loaded.keys() == stored.keys()
    assert ("lm_head.weight" in loaded) is not tied
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)


def test_a_tied_weight_that_is_stored_twice_is_read_once(base: Path, tmp_path: Path) -> None:
    def double(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert "lm_head.weight" not in published(load_model(change_weights(base, tmp_path / "m", double)))


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.gain"] = tensors.pop("model.norm.weight")


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:16].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"'model\.norm\.weight' is missing"),
        (_rename, r"'model\.norm\.gain' is not part"),
        (_cut, r"'model\.norm\.weight': expected \[32\], found \[16\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(base: Path, tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadData, match=message):
        load_model(change_weights(base, tmp_path / "m", change))


def test_a_truncated_file_is_refused(base: Path, tmp_path: Path) -> None:
    folder = change_weights(base, tmp_path / "m", lambda _: None)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-7])
    with pytest.raises(BadData, match="not a readable safetensors file"):
        load_model(folder)


def test_a_family_whose_state_crosses_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(BadConfig, match=r"'mamba'.*would see each other"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(BadData, match="no causal language model"):
        load_model(tmp_path)


def test_loading_draws_no_random_numbers(base: Path) -> None:
    before = torch.get_rng_state()
    load_model(base)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_of_many_files_are_the_weights_of_one(base: Path, tmp_path: Path, alone: None) -> None:
    """Catches a tensor that is cut, lost between two files or in both, and files that another loader does not find."""
    model = load_model(base)
    whole = write_weights(model, tmp_path / "one", dtype=torch.float32)
    parts = write_weights(model, tmp_path / "many", dtype=torch.float32, file_bytes=10_000)
    files = sorted((tmp_path / "many").iterdir())
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(f.stat().st_size < 12_000 or len(load_file(f)) == 1 for f in files)
    assert whole == parts
    manifests = [describe(sorted((tmp_path / name).iterdir())) for name in ("one", "many")]
    assert weights_digest(manifests[0]) == weights_digest(manifests[1])
    shutil.copy(base / "config.json", tmp_path / "many")
    read = published(load_model(tmp_path / "many"))
    assert equal_weights(read, published(model))


def test_a_strided_parameter_is_written_as_it_reads(base: Path, tmp_path: Path, alone: None) -> None:
    """Fault: bytes in the order of memory under the shape of the tensor (verl#6919): other numbers, and a right size."""
    model = load_model(base)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    assert any(not parameter.is_contiguous() for parameter in model.parameters())
    extraction = write_weights(model, tmp_path, dtype=torch.float32)
    assert equal_weights(load_file(tmp_path / "model.safetensors"), weights_of(base))
    assert extraction == write_weights(load_model(base), tmp_path / "plain", dtype=torch.float32)
