//! `kv devices`: the devices that a cache can use, and the reasons for those that are missing.
use kv::backend::Backend;
use kv::cpu::{CpuBackend, CpuOptions};
#[cfg(feature = "cuda")]
use kv::cuda::CardFacts;
use kv::error::DeviceError;
use kv::tier::Bytes;
#[cfg(feature = "wgpu")]
use kv::wgpu::AdapterFacts;
use serde::Serialize;

use crate::args::DevicesArgs;
use crate::failure::one_line;
use crate::output;

#[derive(Debug, Serialize)]
struct Report {
    devices: Vec<Device>,
    /// Backends without a device.
    missing: Vec<Missing>,
}

#[derive(Debug, Serialize)]
struct Missing {
    backend: &'static str,
    reason: String,
}

/// One device; the field `backend` of its JSON object names the kind.
#[derive(Debug, Serialize)]
#[serde(tag = "backend", rename_all = "lowercase")]
#[cfg_attr(
    not(all(feature = "cuda", feature = "wgpu")),
    expect(dead_code, reason = "devices of backends that are not compiled in")
)]
enum Device {
    Cpu {
        name: String,
        instruction_set: String,
        threads: u32,
    },
    Wgpu {
        name: String,
        adapter: String,
        api: String,
        kind: String,
        driver: String,
        buffer_bytes_max: u64,
        binding_bytes_max: u64,
        workgroup_bytes_max: u32,
        subgroups: bool,
        f16: bool,
    },
    Cuda {
        name: String,
        card: String,
        compute_capability: String,
        multiprocessors: u32,
        memory_bytes: u64,
        /// The reason why it cannot be opened.
        #[serde(skip_serializing_if = "Option::is_none")]
        refusal: Option<String>,
    },
}

pub(crate) fn run(args: &DevicesArgs) -> anyhow::Result<()> {
    let report = collect();
    if args.json {
        return output::json(&report);
    }
    output::text(&show(&report))
}

fn collect() -> Report {
    let mut report = Report { devices: Vec::new(), missing: Vec::new() };
    match cpu() {
        Ok(cpu) => report.devices.push(cpu),
        Err(error) => report.miss("cpu", &error.to_string()),
    }
    find_wgpu(&mut report);
    find_cuda(&mut report);
    report
}

impl Report {
    fn miss(&mut self, backend: &'static str, reason: &str) {
        self.missing.push(Missing { backend, reason: one_line(reason) });
    }
}

#[cfg(feature = "wgpu")]
fn find_wgpu(report: &mut Report) {
    let adapters = kv::wgpu::adapters();
    if adapters.is_empty() {
        report.miss("wgpu", "no driver for Vulkan, Metal or DX12 was found");
    }
    report.devices.extend(adapters.into_iter().map(adapter));
}

#[cfg(not(feature = "wgpu"))]
fn find_wgpu(report: &mut Report) {
    report.miss("wgpu", "this program was built without it: add --features wgpu");
}

#[cfg(feature = "cuda")]
fn find_cuda(report: &mut Report) {
    match kv::cuda::cards() {
        Ok(cards) if cards.is_empty() => report.miss("cuda", "the driver sees no card"),
        Ok(cards) => report.devices.extend(cards.into_iter().map(card)),
        Err(error) => report.miss("cuda", &error.to_string()),
    }
}

#[cfg(not(feature = "cuda"))]
fn find_cuda(report: &mut Report) {
    report.miss("cuda", "this program was built without it: add --features cuda");
}

fn cpu() -> Result<Device, DeviceError> {
    let cpu = CpuBackend::open(CpuOptions::default())?;
    Ok(Device::Cpu {
        name: "cpu".to_owned(),
        instruction_set: cpu.isa().to_string(),
        threads: cpu.capabilities().workers,
    })
}

#[cfg(feature = "wgpu")]
fn adapter(facts: AdapterFacts) -> Device {
    Device::Wgpu {
        name: format!("wgpu:{}", facts.index),
        adapter: facts.name,
        api: facts.api,
        kind: facts.kind,
        driver: facts.driver,
        buffer_bytes_max: facts.buffer_bytes_max,
        binding_bytes_max: facts.binding_bytes_max,
        workgroup_bytes_max: facts.workgroup_bytes_max,
        subgroups: facts.has_subgroups,
        f16: facts.has_f16,
    }
}

#[cfg(feature = "cuda")]
fn card(facts: CardFacts) -> Device {
    Device::Cuda {
        name: format!("cuda:{}", facts.index),
        card: facts.name,
        compute_capability: format!("{}.{}", facts.capability / 10, facts.capability % 10),
        multiprocessors: facts.multiprocessors,
        memory_bytes: facts.memory_bytes,
        refusal: facts.refusal,
    }
}

fn show(report: &Report) -> String {
    let devices = report.devices.iter().map(lines);
    let missing = report
        .missing
        .iter()
        .map(|Missing { backend, reason }| vec![format!("{backend:<8}none: {reason}")]);
    devices.chain(missing).flatten().map(|line| line + "\n").collect()
}

/// Formats a device as text: its name, then one fact per line.
fn lines(device: &Device) -> Vec<String> {
    let (name, facts) = match device {
        Device::Cpu { name, instruction_set, threads } => {
            (name, vec![format!("{instruction_set} kernels, {threads} threads")])
        }
        Device::Wgpu { name, adapter, api, kind, driver, .. } => {
            let about = vec![adapter.clone(), format!("{api}, {kind}, driver {driver}")];
            (name, [about, limits(device)].concat())
        }
        Device::Cuda { name, card, refusal, .. } => {
            let refusal = refusal.iter().map(|why| format!("cannot be opened: {why}"));
            (name, [vec![card.clone()], limits(device), refusal.collect()].concat())
        }
    };
    let names = std::iter::once(name.as_str()).chain(std::iter::repeat(""));
    facts.into_iter().zip(names).map(|(fact, name)| format!("{name:<8}{fact}")).collect()
}

fn limits(device: &Device) -> Vec<String> {
    match device {
        Device::Cpu { .. } => Vec::new(),
        Device::Wgpu {
            buffer_bytes_max,
            binding_bytes_max,
            workgroup_bytes_max,
            subgroups,
            f16,
            ..
        } => {
            let (buffer, binding) = (Bytes(*buffer_bytes_max), Bytes(*binding_bytes_max));
            let shared = Bytes(u64::from(*workgroup_bytes_max));
            let has = |is_there: &bool| if *is_there { "yes" } else { "no" };
            vec![
                format!("buffers up to {buffer}, bindings {binding}, workgroup memory {shared}"),
                format!("subgroups {}, f16 {} (neither is needed)", has(subgroups), has(f16)),
            ]
        }
        Device::Cuda { compute_capability, multiprocessors, memory_bytes, .. } => {
            let memory = Bytes(*memory_bytes);
            let processors = format!("{multiprocessors} multiprocessors");
            vec![format!("compute capability {compute_capability}, {processors}, {memory}")]
        }
    }
}
