"""``python -m kvblock``: prints the devices and the features of this installation."""

import sys

import kvblock


def main() -> int:
    print(f"kvblock {kvblock.__version__}, Python {sys.version.split()[0]}")
    print(f"features: {', '.join(kvblock.features())}")
    print(f"devices: {', '.join(kvblock.devices())}")
    for name in ("numpy", "torch", "transformers"):
        try:
            module = __import__(name)
        except ImportError:
            print(f"{name}: not installed")
        else:
            print(f"{name}: {module.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
