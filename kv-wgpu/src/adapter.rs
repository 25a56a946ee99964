//! Adapters of this machine, and the choice of one.
use std::fmt;
use std::str::FromStr;

use kv_core::error::DeviceError;

use crate::device::unsupported;

/// Names the adapter to open.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "an adapter has a place and a name")]
pub enum AdapterName {
    /// Its index in the list of [`adapters`].
    Index(u32),
    /// Part of its name or driver, in any case: the first adapter that has it.
    Named(String),
}

impl Default for AdapterName {
    fn default() -> Self {
        Self::Index(0)
    }
}

impl fmt::Display for AdapterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Named(name) => f.write_str(name),
        }
    }
}

impl FromStr for AdapterName {
    type Err = std::convert::Infallible;

    /// Reads a number as an index and everything else as a name.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text.parse().map_or_else(|_| Self::Named(text.to_owned()), Self::Index))
    }
}

/// Facts that an adapter reports.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdapterFacts {
    /// Index in the list of [`adapters`].
    pub index: u32,
    /// Name of the card, or of the software renderer.
    pub name: String,
    /// `Vulkan`, `Metal` or `Dx12`.
    pub api: String,
    /// Discrete, integrated, virtual, or a CPU.
    pub kind: String,
    /// Whether a CPU runs its shaders.
    pub is_cpu: bool,
    /// Driver and its version, if the adapter reports them.
    pub driver: String,
    /// Bytes of the largest buffer.
    pub buffer_bytes_max: u64,
    /// Bytes of the largest binding.
    pub binding_bytes_max: u64,
    /// Bytes of a workgroup's shared memory.
    pub workgroup_bytes_max: u32,
    /// Whether shaders may use subgroups; none requires them.
    pub has_subgroups: bool,
    /// Whether shaders may use 16-bit floats; none requires them.
    pub has_f16: bool,
}

impl AdapterFacts {
    fn of(adapter: &wgpu::Adapter, index: u32) -> Self {
        let (info, limits, features) = (adapter.get_info(), adapter.limits(), adapter.features());
        let driver = [info.driver, info.driver_info].join(" ").trim().to_owned();
        Self {
            index,
            name: info.name,
            api: format!("{:?}", info.backend),
            kind: format!("{:?}", info.device_type),
            is_cpu: info.device_type == wgpu::DeviceType::Cpu,
            driver,
            buffer_bytes_max: limits.max_buffer_size,
            binding_bytes_max: limits.max_storage_buffer_binding_size,
            workgroup_bytes_max: limits.max_compute_workgroup_storage_size,
            has_subgroups: features.contains(wgpu::Features::SUBGROUP),
            has_f16: features.contains(wgpu::Features::SHADER_F16),
        }
    }
}

/// Lists every adapter of this machine that could be opened. Real cards come before software
/// renderers; otherwise the order is the drivers'.
pub fn adapters() -> Vec<AdapterFacts> {
    all().iter().zip(0..).map(|(adapter, index)| AdapterFacts::of(adapter, index)).collect()
}

fn all() -> Vec<wgpu::Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::PRIMARY;
    // The driver's own validation is useful to developers of wgpu only; an environment variable
    // enables it.
    descriptor.flags = wgpu::InstanceFlags::empty().with_env();
    let instance = wgpu::Instance::new(descriptor);
    let mut found = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::PRIMARY));
    found.sort_by_key(|adapter| adapter.get_info().device_type == wgpu::DeviceType::Cpu);
    found
}

/// Finds the adapter of this name.
pub(crate) fn find(name: &AdapterName) -> Result<(wgpu::Adapter, AdapterFacts), DeviceError> {
    let found = all();
    let facts: Vec<_> =
        found.iter().zip(0..).map(|(adapter, index)| AdapterFacts::of(adapter, index)).collect();
    let names: Vec<_> = facts.iter().map(|facts| facts.name.clone()).collect();
    let chosen = found.into_iter().zip(facts).find(|(_, facts)| match name {
        AdapterName::Index(index) => facts.index == *index,
        AdapterName::Named(part) => {
            facts.name.to_lowercase().contains(&part.to_lowercase())
                || facts.driver.to_lowercase().contains(&part.to_lowercase())
        }
    });
    chosen.ok_or_else(|| {
        let why = if names.is_empty() {
            "no adapter: found no driver for Vulkan, Metal or DX12".to_owned()
        } else {
            format!("no adapter {name}; this machine has {}", names.join(", "))
        };
        unsupported("open an adapter", why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_indices() {
        let parse = |text: &str| text.parse::<AdapterName>().unwrap();
        assert_eq!(parse("2"), AdapterName::Index(2));
        assert_eq!(parse("llvmpipe"), AdapterName::Named("llvmpipe".to_owned()));
        assert_eq!(parse("-1"), AdapterName::Named("-1".to_owned()));
        assert_eq!(AdapterName::default().to_string(), "0");
    }

    #[test]
    fn an_unknown_adapter_is_refused_with_the_known_names() {
        let error = find(&AdapterName::Named("no such card".to_owned())).unwrap_err();
        assert_eq!(error.kind(), kv_core::error::DeviceErrorKind::Unsupported);
        let words = error.to_string();
        let known =
            adapters().first().map_or("no adapter: ".to_owned(), |facts| facts.name.clone());
        assert!(words.contains(&known), "{words}");
    }
}
