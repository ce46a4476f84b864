import pytest
import torch
from safetensors.torch import save_file
from torchrec import KeyedJaggedTensor

from torchrec_dreamshard.profiling.batch_files import BatchFile, save_batch


def _save(tmp_path, **tensors):
    path = tmp_path / "b.safetensors"
    save_file({name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)
    return path


def test_a_keyed_jagged_tensor_comes_back(tmp_path):
    batch = KeyedJaggedTensor.from_lengths_sync(
        keys=["a", "b.c"], values=torch.tensor([1, 2, 3, 9]), lengths=torch.tensor([2, 1, 0, 1], dtype=torch.int32)
    )
    path = tmp_path / "b.safetensors"
    save_batch(path, batch)
    found = BatchFile(path)
    assert list(found) == ["a", "b.c"] and len(found) == 2
    for feature in found:
        assert torch.equal(found[feature].values(), batch[feature].values())
        assert torch.equal(found[feature].lengths(), batch[feature].lengths())
    save_batch(path, batch, ["a"])
    assert list(BatchFile(path)) == ["a"]
    with pytest.raises(KeyError):
        BatchFile(path)["b.c"]


def test_what_is_no_batch_is_refused_with_the_files_name(tmp_path):
    path = tmp_path / "b.safetensors"
    with pytest.raises(FileNotFoundError, match="b.safetensors"):
        BatchFile(path)
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(ValueError, match=r"b\.safetensors is not a safetensors file"):
        BatchFile(path)
    with pytest.raises(ValueError, match=r"b\.safetensors must have tensors.*a\.lengths is missing"):
        BatchFile(_save(tmp_path, a__values=torch.tensor([1])))
    with pytest.raises(ValueError, match=r"got \['weight'\]"):
        BatchFile(_save(tmp_path, weight=torch.tensor([1])))
    with pytest.raises(ValueError, match=r"b\.safetensors: a\.values must be a vector of integers, got float32 of"):
        BatchFile(_save(tmp_path, a__values=torch.rand(2), a__lengths=torch.tensor([2])))["a"]
