//! The lines of README's example, on every device that was built in and can be opened here.
#![cfg(feature = "cpu")]
#![forbid(unsafe_code)]
#![expect(clippy::float_cmp, reason = "sums of a few small integers are exact")]

use kv::{AttentionOptions, Axes, CacheSpec, Device, KvCache, SequenceId, StartOptions};
use kv::{StepInput, TensorView, TensorViewMut};

/// The example; only the name of the device differs from README's.
fn example(device: &str) -> Result<(), kv::Error> {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(16, 64).build()?;
    let mut cache = KvCache::new(Device::open(device)?, spec)?;
    let (seq, prompt) = (SequenceId(0), [11, 22]);
    cache.start(seq, &prompt, StartOptions::default())?;
    let mut step = cache.begin_step(&[StepInput::prompt(seq, &prompt)])?;
    assert_eq!(step.positions(), [0, 1]);
    let (k, v) = ([1.0_f32; 8], [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let (q, mut out) = ([0.0_f32; 8], [0.0_f32; 8]);
    let dims = [2, 1, 4];
    step.write(0, TensorView::host(&k, &dims), TensorView::host(&v, &dims), Axes::Thd)?;
    let out_view = TensorViewMut::host(&mut out, &dims);
    let options = AttentionOptions::causal(0.5); // 1 / sqrt(head_dim)
    step.attend(0, TensorView::host(&q, &dims), out_view, &options)?;
    step.commit()?;
    assert_eq!(out, [1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 6.0], "{device}");
    Ok(())
}

/// Whether README has the lines of [`example`] still.
#[test]
fn the_example_is_that_of_the_readme() {
    let [readme, here] = [include_str!("../../README.md"), include_str!("devices.rs")];
    let lines = |text: &str, begin: &str, end: &str| -> Vec<String> {
        let code = text.split_once(begin).and_then(|(_, rest)| rest.split_once(end));
        let Some((code, _)) = code else { panic!("no lines from {begin} to {end}") };
        let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
        lines.filter(|line| !line.is_empty()).map(str::to_owned).collect()
    };
    let mut expected = lines(readme, "fn main() -> Result<(), kv::Error> {", "assert_eq!(out,");
    for line in &mut expected {
        *line = line.replace("Device::open(\"cpu\")", "Device::open(device)");
    }
    assert!(expected.len() > 10, "{expected:?}");
    assert_eq!(lines(here, "-> Result<(), kv::Error> {", "assert_eq!(out,"), expected);
}

#[test]
fn the_same_lines_run_on_the_cpu() {
    example("cpu").unwrap_or_else(|error| panic!("{error}"));
}

/// On the adapter that `KV_WGPU_ADAPTER` names, or the first; without one, the test says so.
#[cfg(feature = "wgpu")]
#[test]
fn the_same_lines_run_on_wgpu() {
    let adapter = std::env::var("KV_WGPU_ADAPTER").unwrap_or_default();
    let is_any = adapter.is_empty();
    let device = if is_any { "wgpu".to_owned() } else { format!("wgpu:{adapter}") };
    run_or_skip(&device, is_any);
}

/// On the first card; without one, the test says so.
#[cfg(feature = "cuda")]
#[test]
fn the_same_lines_run_on_cuda() {
    run_or_skip("cuda", true);
}

/// On the emulator; without its library, the test says so.
#[cfg(feature = "emulated")]
#[test]
fn the_same_lines_run_on_the_emulator() {
    run_or_skip("emulated", true);
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[expect(clippy::panic, reason = "a helper of tests, outside the test functions")]
fn run_or_skip(device: &str, may_skip: bool) {
    use std::io::Write;
    match Device::open(device) {
        Err(error)
            if may_skip && error.device_kind() == Some(kv::error::DeviceErrorKind::Unsupported) =>
        {
            let _ = writeln!(std::io::stderr(), "skipped: {error}");
        }
        Err(error) => panic!("{device}: {error}"),
        Ok(_) => example(device).unwrap_or_else(|error| panic!("{device}: {error}")),
    }
}
