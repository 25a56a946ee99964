//! Devices by name: text is parsed once into a [`Device`], and a backend opened from that.
use std::fmt;
use std::str::FromStr;

use kv_core::UnknownName;
use kv_core::backend::AnyBackend;

use crate::Error;

/// Which device to open, such as `cpu`, `cuda:0` or `wgpu:radeon`.
///
/// Every backend of the project has a name here, whether it was built in or not, so that a refusal
/// can say which feature is missing.
///
/// ```
/// use kv::{Adapter, Device};
/// assert_eq!("cuda:1".parse::<Device>()?, Device::Cuda { index: 1 });
/// assert_eq!("wgpu".parse::<Device>()?.to_string(), "wgpu:0");
/// let named = Device::Wgpu { adapter: Adapter::Named("radeon".to_owned()) };
/// assert_eq!("wgpu:radeon".parse::<Device>()?, named);
/// assert!("abacus".parse::<Device>().is_err());
/// # #[cfg(feature = "cpu")]
/// let backend = Device::open("cpu")?;
/// # Ok::<(), kv::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Device {
    /// The processor this program runs on.
    #[default]
    Cpu,
    /// A WebGPU adapter.
    Wgpu {
        /// Which of them.
        adapter: Adapter,
    },
    /// A CUDA device.
    Cuda {
        /// Ordinal of the driver.
        index: u32,
    },
    /// The kernels of CUDA devices on this machine's CPU: slow, for tests. Needs the feature
    /// `emulated`.
    #[cfg(feature = "emulated")]
    Emulated,
}

/// Which WebGPU adapter to open.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "an adapter has a place and a name")]
pub enum Adapter {
    /// Its place in the list of adapters.
    Index(u32),
    /// A part of its name or of its driver's, whatever the case: the first that has it.
    Named(String),
}

impl Default for Adapter {
    fn default() -> Self {
        Self::Index(0)
    }
}

impl fmt::Display for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Named(name) => f.write_str(name),
        }
    }
}

impl Device {
    /// Opens a device by its name, such as `cpu` or `cuda:0`.
    ///
    /// # Errors
    /// [`Error::Name`] or [`Error::DeviceIndex`] for a name that no device has; those of
    /// [`Self::connect`].
    pub fn open(name: &str) -> Result<AnyBackend, Error> {
        name.parse::<Self>()?.connect()
    }

    /// Opens this device.
    ///
    /// # Errors
    /// [`Error::NotBuilt`] for a backend whose feature is off; the backend's own when there is no
    /// such device.
    pub fn connect(&self) -> Result<AnyBackend, Error> {
        match self {
            #[cfg(feature = "cpu")]
            Self::Cpu => {
                let backend = kv_cpu::CpuBackend::open(kv_cpu::CpuOptions::default())?;
                Ok(AnyBackend::new(backend))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda { index } => {
                let backend = kv_cuda::CudaBackend::open(&kv_cuda::CudaOptions::new(*index))?;
                Ok(AnyBackend::new(backend))
            }
            #[cfg(feature = "emulated")]
            Self::Emulated => {
                let options = kv_cuda::EmulatorOptions::default();
                Ok(AnyBackend::new(kv_cuda::CudaBackend::emulated(&options)?))
            }
            #[cfg(feature = "wgpu")]
            Self::Wgpu { adapter } => {
                use kv_wgpu::{AdapterName, WgpuBackend, WgpuOptions};
                let name = match adapter {
                    Adapter::Index(index) => AdapterName::Index(*index),
                    Adapter::Named(name) => AdapterName::Named(name.clone()),
                };
                Ok(AnyBackend::new(WgpuBackend::open(&WgpuOptions::new(name))?))
            }
            #[cfg(not(all(feature = "cpu", feature = "cuda", feature = "wgpu")))]
            missing => Err(Error::NotBuilt { backend: missing.backend() }),
        }
    }

    /// Returns the name of the backend.
    pub fn backend(&self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Wgpu { .. } => "wgpu",
            Self::Cuda { .. } => "cuda",
            #[cfg(feature = "emulated")]
            Self::Emulated => "emulated",
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Wgpu { adapter } => write!(f, "wgpu:{adapter}"),
            Self::Cuda { index } => write!(f, "cuda:{index}"),
            #[cfg(feature = "emulated")]
            Self::Emulated => f.write_str("emulated"),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (name, index) = match text.split_once(':') {
            Some((name, index)) => (name, Some(index)),
            None => (text, None),
        };
        let wrong = || Error::DeviceIndex { text: text.to_owned() };
        let number = || index.map_or(Ok(0), |index| index.parse::<u32>().map_err(|_| wrong()));
        match name {
            "cpu" if number()? == 0 => Ok(Self::Cpu),
            "cpu" => Err(wrong()),
            "wgpu" => match index {
                Some(part) if !part.is_empty() && !is_number(part) => {
                    Ok(Self::Wgpu { adapter: Adapter::Named(part.to_owned()) })
                }
                _ => Ok(Self::Wgpu { adapter: Adapter::Index(number()?) }),
            },
            "cuda" => Ok(Self::Cuda { index: number()? }),
            #[cfg(feature = "emulated")]
            "emulated" if index.is_none() => Ok(Self::Emulated),
            _ => Err(UnknownName::new("backend", name, "cpu, wgpu, cuda").into()),
        }
    }
}

/// Whether text stands for a number, be it one that is possible or not.
fn is_number(text: &str) -> bool {
    text.trim_start_matches(['-', '+']).bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for text in
            ["cpu", "wgpu:0", "wgpu:3", "wgpu:llvmpipe", "wgpu:RTX 4090", "cuda:0", "cuda:7"]
        {
            let spec: Device = text.parse().expect(text);
            assert_eq!(spec.to_string(), text);
        }
        assert_eq!("cpu:0".parse::<Device>().expect("cpu:0"), Device::Cpu);
        assert_eq!("cuda".parse::<Device>().expect("cuda"), Device::Cuda { index: 0 });
        let first = Device::Wgpu { adapter: Adapter::Index(0) };
        assert_eq!("wgpu".parse::<Device>().expect("wgpu"), first);
    }

    #[test]
    fn wrong_names_list_the_accepted_ones() {
        for text in ["cpu:1", "cuda:", "cuda:x", "wgpu:", "wgpu:-1", "wgpu:99999999999", "cuda:0:0"]
        {
            let error = text.parse::<Device>().expect_err(text);
            assert!(matches!(error, Error::DeviceIndex { .. }), "{text}: {error}");
        }
        let error = "metal".parse::<Device>().expect_err("metal").to_string();
        assert_eq!(error, r#"unknown backend "metal", expected one of cpu, wgpu, cuda"#);
        // Without the feature `emulated` its device has no name, with it no index.
        let emulated = "emulated".parse::<Device>().map(|device| device.to_string());
        assert_eq!(emulated.is_ok_and(|name| name == "emulated"), cfg!(feature = "emulated"));
        assert!("emulated:0".parse::<Device>().is_err());
        assert!("".parse::<Device>().is_err());
        assert!("CPU".parse::<Device>().is_err());
    }

    #[test]
    fn a_device_opens_or_says_why_not() {
        let built = [("wgpu", cfg!(feature = "wgpu")), ("cuda", cfg!(feature = "cuda"))];
        for (name, is_built) in built {
            let unsupported = Some(kv_core::error::DeviceErrorKind::Unsupported);
            match Device::open(name) {
                Ok(_) => assert!(is_built, "{name}"),
                Err(error) if is_built => assert_eq!(error.device_kind(), unsupported, "{error}"),
                Err(error) => {
                    assert!(matches!(error, Error::NotBuilt { backend } if backend == name));
                    let words = format!("built without feature `{name}`");
                    assert!(error.to_string().contains(&words), "{error}");
                }
            }
        }
    }

    #[cfg(feature = "wgpu")]
    #[test]
    fn a_missing_adapter_is_named() {
        let error = Device::open("wgpu:no such card").expect_err("no such card");
        assert_eq!(error.device_kind(), Some(kv_core::error::DeviceErrorKind::Unsupported));
        assert!(error.to_string().contains("no adapter"), "{error}");
    }

    #[cfg(feature = "cpu")]
    #[test]
    fn the_cpu_opens() {
        use kv_core::backend::Backend;
        assert_eq!(Device::open("cpu").expect("cpu").name(), "cpu");
    }
}
