"""Build flags under FlashAttention-3's names, for clients that ask what a build leaves out.

Nothing is left out but kernels for other GPUs (SM8x): what has no kernel runs on the portable backend.
"""

_DISABLE = (
    "BACKWARD SPLIT PAGEDKV APPENDKV LOCAL SOFTCAP PACKGQA FP16 FP8 VARLEN CLUSTER "
    "HDIM64 HDIM96 HDIM128 HDIM192 HDIM256 SM8x"
).split()

CONFIG = {
    "build_flags": {
        **{f"FLASHATTENTION_DISABLE_{name}": name == "SM8x" for name in _DISABLE},
        "FLASHATTENTION_ENABLE_VCOLMAJOR": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF64": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF192": False,
    }
}


def show() -> None:
    """Print the build flags."""
    for name, value in CONFIG["build_flags"].items():
        print(f"{name}: {value}")
