#!/usr/bin/env bash
# formula.sh SDIST: prints the Homebrew formula of the release that SDIST is of.
set -euo pipefail
NAME=$(basename "$1")
VERSION=${NAME#towerd-}
VERSION=${VERSION%.tar.gz}
SHA256=$({ sha256sum "$1" 2>/dev/null || shasum -a 256 "$1"; } | cut -d' ' -f1)
cat <<FORMULA
class Towerd < Formula
  desc "Local daemon that gives llama.cpp a memory"
  homepage "https://pypi.org/project/towerd/"
  url "https://files.pythonhosted.org/packages/source/t/towerd/$NAME"
  sha256 "$SHA256"
  license "Apache-2.0"

  depends_on "python@3.13"

  def install
    # The wheel, which has llama.cpp in it: nothing is compiled.
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    system libexec/"bin/pip", "install", "--only-binary", ":all:", "towerd==$VERSION"
    bin.install_symlink libexec/"bin/towerd", libexec/"bin/towerctl"
  end

  service do
    run [opt_bin/"towerd", "serve"]
    keep_alive true
    log_path var/"log/towerd.log"
    error_log_path var/"log/towerd.log"
  end

  test do
    system bin/"towerctl", "doctor", "--store-dir", testpath/"store", "--socket", testpath/"s.sock"
  end
end
FORMULA
