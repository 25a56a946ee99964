//! Devices by name: text is parsed once into a [`Device`], and a backend opened from that.
use std::fmt;
use std::str::FromStr;

use kv_core::{AnyBackend, UnknownName};

use crate::Error;

/// Which device to open, such as `cpu` or `cuda:0`.
///
/// Every backend of the project has a name here, whether it was built in or not, so that a refusal
/// can say which feature is missing.
///
/// ```
/// use kv::Device;
/// assert_eq!("cuda:1".parse::<Device>()?, Device::Cuda { index: 1 });
/// assert_eq!("wgpu".parse::<Device>()?.to_string(), "wgpu:0");
/// assert!("abacus".parse::<Device>().is_err());
/// # #[cfg(feature = "cpu")]
/// let backend = Device::open("cpu")?;
/// # Ok::<(), kv::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Device {
    /// The processor this program runs on.
    #[default]
    Cpu,
    /// A WebGPU adapter.
    Wgpu {
        /// Place in the adapter list.
        index: u32,
    },
    /// A CUDA device.
    Cuda {
        /// Ordinal of the driver.
        index: u32,
    },
}

impl Device {
    /// Opens a device by its name, such as `cpu` or `cuda:0`.
    ///
    /// # Errors
    /// [`Error::Name`] or [`Error::DeviceIndex`] for a name that no device has, else as
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
            missing => Err(Error::NotBuilt { backend: missing.backend() }),
        }
    }

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Wgpu { .. } => "wgpu",
            Self::Cuda { .. } => "cuda",
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Wgpu { index } => write!(f, "wgpu:{index}"),
            Self::Cuda { index } => write!(f, "cuda:{index}"),
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
            "wgpu" => Ok(Self::Wgpu { index: number()? }),
            "cuda" => Ok(Self::Cuda { index: number()? }),
            _ => Err(UnknownName::new("backend", name, "cpu, wgpu, cuda").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for text in ["cpu", "wgpu:0", "wgpu:3", "cuda:0", "cuda:7"] {
            let spec: Device = text.parse().expect(text);
            assert_eq!(spec.to_string(), text);
        }
        assert_eq!("cpu:0".parse::<Device>().expect("cpu:0"), Device::Cpu);
        assert_eq!("cuda".parse::<Device>().expect("cuda"), Device::Cuda { index: 0 });
    }

    #[test]
    fn wrong_names_say_what_would_do() {
        for text in ["cpu:1", "cuda:", "cuda:x", "wgpu:-1", "cuda:99999999999", "cuda:0:0"] {
            let error = text.parse::<Device>().expect_err(text);
            assert!(matches!(error, Error::DeviceIndex { .. }), "{text}: {error}");
        }
        let error = "metal".parse::<Device>().expect_err("metal").to_string();
        assert_eq!(error, r#"unknown backend "metal", expected one of cpu, wgpu, cuda"#);
        assert!("".parse::<Device>().is_err());
        assert!("CPU".parse::<Device>().is_err());
    }

    #[test]
    fn a_backend_that_is_not_built_in_names_its_feature() {
        let error = Device::open("wgpu").expect_err("no wgpu yet").to_string();
        assert!(error.contains("built without feature `wgpu`"), "{error}");
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn cuda_opens_or_says_why_not() {
        if let Err(error) = Device::open("cuda") {
            let kind = kv_core::DeviceErrorKind::Unsupported;
            assert!(matches!(&error, Error::Device(e) if e.kind() == kind), "{error}");
        }
    }

    #[cfg(feature = "cpu")]
    #[test]
    fn the_cpu_opens() {
        use kv_core::Backend;
        assert_eq!(Device::open("cpu").expect("cpu").name(), "cpu");
    }
}
