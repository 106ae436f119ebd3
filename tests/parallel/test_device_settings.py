"""What a run sets for its GPUs, and what it leaves to the user."""

from lightscale.parallel.device.settings import apply_device_settings, describe_device_settings, device_settings


def test_one_queue_only_for_tensor_ranks() -> None:
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in device_settings({})
    assert device_settings({}, tensor=2)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_what_the_user_has_set_stays() -> None:
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "TORCH_NCCL_HIGH_PRIORITY": "0"}
    assert device_settings(own, tensor=2) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    # Both names of the allocator's settings are one: PyTorch would take the newer one and drop the user's.
    older = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    assert not any("ALLOC" in name for name in device_settings(older))


def test_the_log_says_what_is_set() -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    apply_device_settings(environ, tensor=2)
    assert describe_device_settings(environ) == (
        "device settings: PYTORCH_CUDA_ALLOC_CONF=backend:native, TORCH_NCCL_HIGH_PRIORITY=1, "
        "CUDA_DEVICE_MAX_CONNECTIONS=1"
    )
    assert describe_device_settings({}) == "device settings: none"
