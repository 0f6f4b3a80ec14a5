"""`[model]`: which checkpoint, loaded how, and which of `from_pretrained`'s options a job may give."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from harvest.settings.base import Settings

OF_OURS = {
    "adapter_kwargs": "model.adapter",
    "adapter_name": "model.adapter",
    "attn_implementation": "model.attention",
    "config": "model.name",
    "device_map": "model.device_map",
    "dtype": "model.dtype",
    "gguf_file": "model.name",
    "load_in_4bit": "model.quantization",
    "load_in_8bit": "model.quantization",
    "quantization_config": "model.quantization",
    "revision": "model.revision",
    "subfolder": "model.name",
    "torch_dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
}
"""Options of `from_pretrained` that a setting decides, so that the plan knows it."""
NO_OPTIONS = (
    "device_mesh",
    "distributed_config",
    "ignore_mismatched_sizes",
    "output_attentions",
    "output_hidden_states",
    "output_loading_info",
    "return_dict",
    "state_dict",
    "tp_plan",
    "tp_size",
    "use_cache",
    "weights_only",
)
"""Options that change what a forward gives, what is loaded behind the fingerprint's back, or what a pickle may do."""
SPREADINGS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways in which accelerate spreads a replica by itself."""
OF_SPREADING = ("max_memory", "offload_folder", "offload_buffers")
"""Options of `from_pretrained` that `model.device_map` is needed for."""


class ModelSettings(Settings):
    """The checkpoint; everything as in transformers."""

    name: str = Field(min_length=1)
    """Hub id, folder, `.gguf` file or `package:NAME/inside/path`."""
    revision: str = "main"
    """Branch, tag or commit on the hub; the commit that it stands for is recorded."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the forward computes in; `auto`: the checkpoint's own."""
    device: str = "auto"
    """`cpu`, `cuda` or `cuda:1`; `auto`: the first CUDA device where there is one."""
    attention: str = "auto"
    """Implementation, as in transformers: `sdpa`, `eager`, `flash_attention_2`, ..."""
    compile: bool = False
    """Whether torch compiles the blocks: half a minute more at the start, then a faster forward; only for sites at the
    borders of blocks."""
    device_map: str | dict[str, int | str] | None = None
    """How accelerate spreads a replica: a way of its own, or module -> device, `cpu` or `disk`."""
    trust_remote_code: bool = False
    """Whether code that comes with the checkpoint may run."""
    adapter: str | None = Field(default=None, min_length=1)
    """PEFT adapter on top of the checkpoint: a folder, a hub id or `package:NAME/inside/path`."""
    quantization: Literal["nf4", "int8"] | None = None
    """By bitsandbytes, while the weights are loaded."""
    options: dict[str, Any] = Field(default={})
    """Further options of `from_pretrained`, such as `max_memory`."""

    @field_validator("device_map", mode="before")
    @classmethod
    def _known_spreading(cls, spreading: Any) -> Any:
        if spreading is not None and not isinstance(spreading, dict) and spreading not in SPREADINGS:
            raise ValueError(f"allowed are {', '.join(map(repr, SPREADINGS))} and a table of module = device")
        return spreading

    @model_validator(mode="after")
    def _one_say_about_devices(self) -> ModelSettings:
        if self.device_map is not None and self.device != "auto":
            raise ValueError(f"device = {self.device!r}: decided by model.device_map; leave one of them out")
        without = [key for key in OF_SPREADING if key in self.options and self.device_map is None]
        if without:
            raise ValueError(f"options.{without[0]}: needs model.device_map, such as 'auto'")
        return self

    @field_validator("options")
    @classmethod
    def _options_of_no_setting(cls, options: dict[str, Any]) -> dict[str, Any]:
        for key in options:
            if key in OF_OURS:
                raise ValueError(f"{key}: decided by {OF_OURS[key]}; leave it out")
            if key in NO_OPTIONS or (key == "use_safetensors" and options[key] is not True):
                raise ValueError(f"{key}: not for a job; leave it out")
            if key.endswith("token") or any(word in key.lower() for word in ("auth", "secret", "password")):
                raise ValueError(f"{key}: secrets are read from the environment only; leave it out")
        return options
