"""`kvrelay calibrate`: learn the KV scales that outlive a page from prompts of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from services.cli import console
from services.cli.application import application
from services.cli.connection import JsonOption
from services.cli.prompts import read_prompts
from shared.errors import Misconfigured

if TYPE_CHECKING:
    from kernels.layout import PageLayout
    from kernels.scale_file import ScaleFile
    from shared.models.files import ModelFiles
    from shared.settings import PrefillSettings

app = application()
DEFAULT_FORMAT = "fp8_per_tensor"
SUFFIXES = (".safetensors", ".json")


@app.command()
def calibrate(
    prompts: Annotated[str, typer.Option(help="One prompt a line, or JSON lines with prompt or messages; - is stdin.")],
    out: Annotated[Path, typer.Option(help="File to write: .safetensors or .json.")],
    model: Annotated[str | None, typer.Option(help="As for up.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="As for up.", show_default=False)] = None,
    policy: Annotated[
        Literal["max", "smoothed_max"], typer.Option(help="max: no prompt saturates; smoothed_max forgets old peaks.")
    ] = "max",
    kv_cache_dtype: Annotated[str | None, typer.Option(help=f"Format to calibrate for ({DEFAULT_FORMAT}).")] = None,
    k_cache_dtype: Annotated[str | None, typer.Option(help="Of keys alone.", show_default=False)] = None,
    v_cache_dtype: Annotated[str | None, typer.Option(help="Of values alone.", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 65_536,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads; default: all usable cores.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the model on your prompts and write the scales that formats named per_tensor need.

    Use the file with `kvrelay up --kv-scales-path FILE` and the same --kv-cache-dtype.
    """
    from shared import compute_environment, settings
    from shared.models import files

    if out.suffix not in SUFFIXES:
        raise typer.BadParameter(f"the name must end in {' or '.join(SUFFIXES)}", param_hint="--out")
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"{out.absolute().parent} is not a folder", param_hint="--out")
    names = {"kv_cache_dtype": kv_cache_dtype, "k_cache_dtype": k_cache_dtype, "v_cache_dtype": v_cache_dtype}
    wanted = settings.load(settings.PrefillSettings, {"model": model, "dtype": dtype, "threads": threads, **names})
    if wanted.kv_cache_dtype == "auto" and wanted.k_cache_dtype is wanted.v_cache_dtype is None:
        wanted = wanted.model_copy(update={"kv_cache_dtype": DEFAULT_FORMAT})
    found = read_prompts(prompts)
    compute_environment.prepare(wanted.threads or compute_environment.usable_cores())  # before torch is imported
    ready = files.prepare(wanted.model, wanted.dtype)
    scales = _learn(ready, wanted, found, policy, max_tokens)
    from kernels.scale_file import write

    try:
        write(out, scales)
    except OSError as error:
        raise Misconfigured(f"cannot write {out}: {error.strerror or error}") from error
    _report(out, scales, len(found), as_json)


def _learn(ready: ModelFiles, wanted: PrefillSettings, prompts: list[Any], policy: str, max_tokens: int) -> ScaleFile:
    from services.cli.progress import Bar
    from shared.compute_environment import usable_cores
    from shared.models import calibration, runtime
    from shared.models.tokenizer import Tokenizer
    from shared.pool.layout import TAIL_FORMATS, pages_for

    pages: PageLayout = pages_for(ready.config, TAIL_FORMATS[ready.dtype], wanted)
    if not pages.needs_scales:
        raise Misconfigured(f"{pages.k_format} keys and {pages.v_format} values keep their scales in the page: "
                            "there is nothing to calibrate")  # fmt: skip
    tokenizer = Tokenizer.load(ready)
    ids, left = [], max_tokens
    for prompt in prompts:
        tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
        ids.append(tokens[: min(left, ready.config.context_length)])
        left -= len(ids[-1])
    total = max_tokens - left
    model = runtime.load(ready, ready.dtype, wanted.kernels, wanted.threads or usable_cores())
    with Bar("tokens") as bar:
        return calibration.calibrate(
            model, ready.identity, ids, pages, policy, lambda what, done: bar.update(what, done, total)
        )


def _report(out: Path, scales: ScaleFile, prompts: int, as_json: bool) -> None:
    if as_json:
        facts = {"policy": scales.policy, "k_format": scales.k_format, "v_format": scales.v_format}
        numbers = {"k_scale": scales.k_scale, "v_scale": scales.v_scale}
        console.print_json({"path": str(out), "prompts": prompts, "tokens": scales.tokens, **facts, **numbers})
        return
    said = f"{out}: scales of {len(scales.k_scale)} layers from {scales.tokens:,} tokens of {prompts:,} prompts"
    console.out().print(said, highlight=False, soft_wrap=True)
    flags = f"--k-cache-dtype {scales.k_format} --v-cache-dtype {scales.v_format} --kv-scales-path {out}"
    console.out().print(f"use it with: kvrelay up {flags}", highlight=False, soft_wrap=True)
