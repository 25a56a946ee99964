//! Runs the examples of `kv` on every device that a test machine has.
//!
//! An example asserts its own results and takes the name of a device.
use std::env;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::emulator::{self, Sanitizer};
use crate::workspace::Workspace;
use crate::{conformance, programs, shell};

/// A device, and its backend's message on a machine without it.
struct Device {
    /// As `kv::Device::open` takes it.
    name: String,
    /// Part of the error that an example ends with; `None` for a device that must be there.
    absent: Option<&'static str>,
}

/// Names an adapter by its place or a part of its name, as for the tests.
const ADAPTER: &str = "KV_WGPU_ADAPTER";

/// The error of `kv-wgpu` without an adapter. Any other error, `Unsupported` by another operation
/// too, is a failure.
const NO_ADAPTER: &str = "kind: Unsupported, operation: \"open an adapter\"";

/// Runs each example on each device.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let targets = workspace.package("kv").into_iter().flat_map(|kv| kv.targets_of("example"));
    let examples = targets.map(|target| programs::plain("example", &target.name));
    let examples = examples.collect::<Result<Vec<_>>>()?;
    if examples.is_empty() {
        bail!("crate kv has no examples");
    }
    let library = emulator::library(Sanitizer::None)?;
    for device in devices(&env::var(ADAPTER).unwrap_or_default()) {
        let start = Instant::now();
        let mut skipped = None;
        for example in &examples {
            let mut command = shell::program(example);
            conformance::quiet_drivers(&mut command, workspace)?;
            command.arg(&device.name).env(emulator::SETTING, &library);
            skipped = run_one(&mut command, &device)?;
            if skipped.is_some() {
                break;
            }
        }
        if let Some(error) = skipped {
            println!("{} skipped: {error}", device.name);
        } else {
            let what = format!("{} examples on {}", examples.len(), device.name);
            shell::note(&what, start.elapsed());
        }
    }
    Ok(())
}

/// Returns every backend; of WebGPU the named adapter, which must exist, or the first one.
fn devices(adapter: &str) -> [Device; 3] {
    let wgpu = match adapter {
        "" => Device { name: "wgpu".to_owned(), absent: Some(NO_ADAPTER) },
        named => Device { name: format!("wgpu:{named}"), absent: None },
    };
    let present = |name: &str| Device { name: name.to_owned(), absent: None };
    [present("cpu"), wgpu, present("emulated")]
}

/// Runs an example. Returns its error where the machine lacks the device.
fn run_one(command: &mut Command, device: &Device) -> Result<Option<String>> {
    let line = shell::line(command);
    println!("$ {line}");
    let output = command.output().with_context(|| format!("cannot start `{line}`"))?;
    print!("{}", String::from_utf8_lossy(&output.stdout));
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        return Ok(None);
    }
    match device.absent {
        Some(absent) if errors.contains(absent) => Ok(Some(errors.trim().to_owned())),
        _ => bail!("`{line}` failed ({}):\n{}", output.status, errors.trim()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends_with(words: &str, device: &Device) -> Result<Option<String>> {
        run_one(shell::program("sh").args(["-c", "echo \"$1\" >&2; exit 1", "sh", words]), device)
    }

    #[test]
    fn only_an_adapter_that_is_not_there_is_skipped() {
        let [cpu, wgpu, emulated] = devices("");
        let absent = format!("Error: Cache(Device(DeviceError {{ {NO_ADAPTER}, detail: None }}))");
        assert_eq!(ends_with(&absent, &wgpu).unwrap(), Some(absent.clone()));
        for device in [&cpu, &emulated, &devices("llvmpipe")[1]] {
            let error = ends_with(&absent, device).unwrap_err().to_string();
            assert!(error.contains(&absent), "{}: {error}", device.name);
        }
        let attend = absent.replace("open an adapter", "attend");
        assert!(ends_with(&attend, &wgpu).unwrap_err().to_string().contains("attend"));
        let passed = run_one(&mut shell::program("true"), &wgpu).unwrap();
        assert_eq!(passed, None);
    }

    #[test]
    fn the_adapter_of_the_tests_is_that_of_the_examples() {
        let names = |adapter| devices(adapter).map(|device| device.name);
        assert_eq!(names(""), ["cpu", "wgpu", "emulated"]);
        assert_eq!(names("llvmpipe"), ["cpu", "wgpu:llvmpipe", "emulated"]);
    }

    /// Compares the names with the `Debug` output of the error that `kv-wgpu` makes.
    #[test]
    fn the_operation_is_named_as_in_the_backend() {
        let path = shell::root().join("kv-wgpu/src/adapter.rs");
        let source = std::fs::read_to_string(path).unwrap();
        assert!(source.contains("unsupported(\"open an adapter\""));
    }
}
