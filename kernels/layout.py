"""Where every byte of a page and of a tail is. Pure: no torch, no numpy.

    page = for each layer:  K codes [kv_heads, head_dim, block_size] · K scales
                            V codes [kv_heads, block_size, head_dim] · V scales
    tail = for each layer:  K [kv_heads, block_size, head_dim] · V [kv_heads, block_size, head_dim], in compute dtype

Segments start at multiples of 64 bytes, a page is a multiple of 4 KiB. `formats/<name>.py` says what a segment holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernels import formats
from kernels.formats import Shape

ALIGN = 64
PAGE_ALIGN = 4096
TABLE_ENTRY_BYTES = 160
"""What keeping one page on the books costs: index and generation in a block table, and about 150 bytes in the ledger
(key, place in the prefix index and in the eviction order, state), as measured with every page cached."""
TAIL_FORMATS = ("bf16", "fp16", "fp32")

_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "fp8_per_token_head": "fp8_e4m3",
    "fp8_e4m3_per_token_head": "fp8_e4m3",
    "fp8_e5m2_per_token_head": "fp8_e5m2",
    "fp8_per_tensor": "fp8_e4m3_per_tensor",
    "int8_per_token_head": "int8",
    "int8_per_channel": "int8_channel",
    "quantised": "int8_channel",
    "quantized": "int8_channel",
}
"""Names of the granularities `per_tensor`, `per_token_head` and `per_channel` (of keys), and those of torch."""
_PAIRS = {"k16v4": ("auto", "int4"), "k8v4": ("int8_channel", "int4")}


def _up(value: int, align: int) -> int:
    return -(-value // align) * align


@dataclass(frozen=True)
class LayerLayout:
    """Byte offsets of one layer: `k_*`, `v_*` inside the page, where it begins at `offset`; `tail_*` in the tail."""

    offset: int
    k_format: str
    v_format: str
    k_codes: int
    k_scales: int
    v_codes: int
    v_scales: int
    tail_k: int
    tail_v: int

    def check_scales(self, given: bool) -> None:
        """Raises ValueError if a format of this layer has scales that outlive a page, and none are given."""
        if not given and any(formats.load(name).outlives_page for name in (self.k_format, self.v_format)):
            raise ValueError(f"{self.k_format}/{self.v_format} needs scales that outlive a page; give kv_scales_path")


@dataclass(frozen=True)
class PageLayout:
    """Geometry of one pool. `layer_bytes` is the size of a quantised (not skipped) layer inside a page."""

    k_format: str
    v_format: str
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    skip_layers: tuple[int, ...]
    tail_format: str
    page_bytes: int
    tail_bytes: int
    layer_bytes: int
    per_layer: tuple[LayerLayout, ...]

    def layer(self, index: int) -> LayerLayout:
        """Offsets of layer `index`."""
        return self.per_layer[index]

    @property
    def shape(self) -> Shape:
        """Geometry of one layer of one page, as formats take it."""
        return Shape(self.block_size, self.kv_heads, self.head_dim)

    @property
    def needs_scales(self) -> bool:
        """True if a side's scale outlives a page and must come from a scale file."""
        return any(formats.load(name).outlives_page for name in (self.k_format, self.v_format))

    def bytes_per_token(self) -> float:
        """Bytes of pool one cached token costs, alignment included, over all layers."""
        return self.page_bytes / self.block_size

    def table_share(self) -> float:
        """Share of the block table and the ledger in all memory of the cache."""
        return TABLE_ENTRY_BYTES / (TABLE_ENTRY_BYTES + self.page_bytes)

    def scale_share(self) -> float:
        """Share of scales, centres and padding in a page: what is not codes."""
        codes = 0
        for place in self.per_layer:
            k, v = formats.load(place.k_format), formats.load(place.v_format)
            codes += k.sizes_k(self.shape).codes + v.sizes_v(self.shape).codes
        return 1 - codes / self.page_bytes


def parse_kv_cache_dtype(
    name: str, k: str | None = None, v: str | None = None, compute: str = "bf16"
) -> tuple[str, str]:
    """(K format, V format) of `kv_cache_dtype`, overridden by `k_cache_dtype` and `v_cache_dtype`.

    "auto" is the compute dtype. Raises ValueError that names the value and the known formats.
    """
    both = [_format(side, compute, more=_PAIRS) for side in _PAIRS.get(name, (name, name))]
    return both[0] if k is None else _format(k, compute), both[1] if v is None else _format(v, compute)


def _format(value: str, compute: str, more: Iterable[str] = ()) -> str:
    """The format that `value` names. ValueError lists all formats, and `more`."""
    known = _ALIASES.get(compute, compute) if value == "auto" else _ALIASES.get(value, value)
    if known not in formats.names():
        choices = ", ".join(("auto", *formats.names(), *more))
        raise ValueError(f"there is no KV format {value!r}; choose one of {choices}")
    return known


def parse_skip_layers(items: Iterable[str | int], layers: int) -> tuple[int, ...]:
    """Sorted layer indices of `kv_cache_dtype_skip_layers`, whose items are indices, `first:n` and `last:n`.

    Raises ValueError for another form, or beyond the model.
    """
    found: set[int] = set()
    for item in items:
        kind, _, count = str(item).strip().partition(":")
        if not (count or kind).isdecimal() or (count and kind not in ("first", "last")):
            raise ValueError(f"kv_cache_dtype_skip_layers: {item!r} is not an index, first:n or last:n")
        number = int(count or kind)
        if number > layers or (not count and number == layers):
            raise ValueError(f"kv_cache_dtype_skip_layers: {item!r} is beyond the model's {layers} layers")
        found.update(range(number) if kind == "first" else range(layers - number, layers) if count else [number])
    return tuple(sorted(found))


def page_layout(
    k_format: str,
    v_format: str,
    block_size: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    skip_layers: Iterable[int] = (),
    tail_format: str = "bf16",
) -> PageLayout:
    """Geometry of a pool. Layers in `skip_layers` are stored in `tail_format`. Raises ValueError for what cannot be."""
    if block_size not in (16, 32):
        raise ValueError(f"block_size must be 16 or 32, not {block_size}")
    if head_dim % 16 or not 16 <= head_dim <= 256:
        raise ValueError(f"head_dim must be a multiple of 16 up to 256, not {head_dim}")
    if layers < 1 or kv_heads < 1:
        raise ValueError(f"layers and kv_heads must be positive, not {layers} and {kv_heads}")
    if tail_format not in TAIL_FORMATS:
        raise ValueError(f"tail_format must be one of {', '.join(TAIL_FORMATS)}, not {tail_format!r}")
    skipped = tuple(sorted(set(skip_layers)))
    if skipped and not 0 <= skipped[0] <= skipped[-1] < layers:
        raise ValueError(f"skip_layers {skipped} are beyond the model's {layers} layers")

    shape = Shape(block_size, kv_heads, head_dim)
    tail_side = _up(formats.load(tail_format).sizes_k(shape).codes, ALIGN)
    placed: list[LayerLayout] = []
    offset = layer_bytes = 0
    for index in range(layers):
        k_name, v_name = (tail_format, tail_format) if index in skipped else (k_format, v_format)
        start = offset
        starts: list[int] = []
        for size in (*formats.load(k_name).sizes_k(shape), *formats.load(v_name).sizes_v(shape)):
            starts.append(offset)
            offset = _up(offset + size, ALIGN)
        tail = 2 * tail_side * index
        k_codes, k_scales, v_codes, v_scales = starts
        placed.append(LayerLayout(start, k_name, v_name, k_codes, k_scales, v_codes, v_scales, tail, tail + tail_side))
        if index not in skipped:
            layer_bytes = offset - start
    return PageLayout(
        k_format=k_format,
        v_format=v_format,
        block_size=block_size,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        skip_layers=skipped,
        tail_format=tail_format,
        page_bytes=_up(offset, PAGE_ALIGN),
        tail_bytes=2 * tail_side * layers,
        layer_bytes=layer_bytes or offset // layers,
        per_layer=tuple(placed),
    )
