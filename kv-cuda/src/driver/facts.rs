//! Facts about driver and devices, and the requirements they must meet.
use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute as Attribute};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::num::to_u64;

use super::error::{check, error, refuse};
use super::library::{Optional, exports, library};
use crate::code::Arch;
use crate::gpu::Facts;

/// The abilities of the driver.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Driver {
    /// Version of CUDA: 13000 for 13.0.
    pub(super) version: u32,
    /// Functions that older drivers lack.
    pub(super) optional: Optional,
    /// Memory pools, if the device has them too.
    pub(super) pools: bool,
}

/// Returns whether the driver's library can be loaded. cudarc panics if it cannot, so everything
/// here calls this first.
pub(super) fn is_driver_present() -> bool {
    library().is_some()
}

/// Loads and initialises the driver.
pub(super) fn require_driver() -> Result<Driver, DeviceError> {
    let unsupported = |reason| Err(refuse(DeviceErrorKind::Unsupported, OPEN, reason));
    let Some(library) = library() else {
        return unsupported("no CUDA driver library on this machine".to_owned());
    };
    // cudarc panics on calls of a missing one.
    if let Some(missing) = FUNCTIONS.iter().find(|name| !exports(library, name)) {
        return unsupported(format!("the CUDA driver is too old: it has no {missing}"));
    }
    // SAFETY: the driver exports the function; it takes no flags.
    let code = unsafe { sys::cuInit(0) };
    if let Err(error) = check(OPEN, code) {
        // Whatever the cause, no device is usable.
        return match error.kind() {
            DeviceErrorKind::Unsupported | DeviceErrorKind::OutOfMemory => Err(error),
            _ => unsupported(error.to_string()),
        };
    }
    let mut version = 0;
    // SAFETY: an out-pointer for a number.
    check(OPEN, unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(Driver {
        version: u32::try_from(version).unwrap_or(0),
        optional: Optional::of(library),
        pools: POOL_FUNCTIONS.iter().all(|name| exports(library, name)),
    })
}

/// The driver's facts about a card.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CardFacts {
    /// The driver's ordinal.
    pub index: u32,
    /// Name of the card.
    pub name: String,
    /// Compute capability: 90 for 9.0.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// The reason for which it cannot be opened, if that is known without trying.
    pub refusal: Option<String>,
}

/// Lists every card that the driver sees. Opens none of them.
///
/// # Errors
/// `Unsupported` without a driver or with one that is too old, with the reason; `Driver`.
pub fn cards() -> Result<Vec<CardFacts>, DeviceError> {
    require_driver()?;
    let card = |index: u32| {
        let facts = read(device(index)?)?;
        let refusal = require_capability(&facts).err().map(|error| error.to_string());
        let Facts { card: name, multiprocessors, capability, memory: memory_bytes, .. } = facts;
        Ok(CardFacts { index, name, capability, multiprocessors, memory_bytes, refusal })
    };
    (0..u32::try_from(count()?).unwrap_or(0)).map(card).collect()
}

/// Returns the number of devices that the driver sees.
fn count() -> Result<c_int, DeviceError> {
    let mut count = 0;
    // SAFETY: an out-pointer for a number; the driver was started.
    check(OPEN, unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    Ok(count)
}

/// Returns the device of an ordinal.
pub(super) fn device(ordinal: u32) -> Result<CUdevice, DeviceError> {
    let count = count()?;
    let ordinal = require_ordinal(ordinal, count)?;
    let mut device = 0;
    // SAFETY: an out-pointer for a device, and an ordinal below their number.
    check(OPEN, unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
    Ok(device)
}

fn require_ordinal(ordinal: u32, count: c_int) -> Result<c_int, DeviceError> {
    c_int::try_from(ordinal).ok().filter(|ordinal| *ordinal < count).ok_or_else(|| {
        let reason = match count {
            0 => "the driver sees no device".to_owned(),
            count => format!("no device {ordinal}: the driver sees {count}"),
        };
        refuse(DeviceErrorKind::Unsupported, OPEN, reason)
    })
}

/// Reads the facts that decide how work is split.
pub(super) fn read(device: CUdevice) -> Result<Facts, DeviceError> {
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: an out-pointer for a number, and a device of this driver.
        check(OPEN, unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
        Ok::<_, DeviceError>(u32::try_from(value).unwrap_or(0))
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let mut memory = 0;
    // SAFETY: an out-pointer for a number, and a device of this driver.
    check(OPEN, unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory, device) })?;
    Ok(Facts {
        card: card(device)?,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        capability: major * 10 + minor,
        memory: to_u64(memory),
        shared_bytes_max: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )?,
    })
}

fn card(device: CUdevice) -> Result<String, DeviceError> {
    let mut name: [c_char; 256] = [0; 256];
    let room = c_int::try_from(name.len()).unwrap_or(0);
    // SAFETY: the buffer has the length that is passed, and the device is this driver's.
    let code = unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), room, device) };
    check(OPEN, code)?;
    let bytes: &[u8] = bytemuck::must_cast_slice(&name);
    Ok(CStr::from_bytes_until_nul(bytes).unwrap_or_default().to_string_lossy().into_owned())
}

/// Refuses devices that the kernels do not support.
pub(super) fn require_capability(facts: &Facts) -> Result<(), DeviceError> {
    if facts.capability >= Arch::CAPABILITY_MIN {
        return Ok(());
    }
    let dotted = |capability: u32| format!("{}.{}", capability / 10, capability % 10);
    let (found, least) = (dotted(facts.capability), dotted(Arch::CAPABILITY_MIN));
    let reason =
        format!("{} has compute capability {found}, at least {least} is needed", facts.card);
    Err(refuse(DeviceErrorKind::Unsupported, OPEN, reason))
}

/// Reads one number through an out-pointer.
pub(super) fn number(
    operation: &'static str,
    ask: impl FnOnce(*mut c_int) -> sys::CUresult,
) -> Result<u32, DeviceError> {
    let mut value = 0;
    match ask(&raw mut value) {
        sys::CUresult::CUDA_SUCCESS => Ok(u32::try_from(value).unwrap_or(0)),
        code => Err(error(operation, code)),
    }
}

pub(super) const OPEN: &str = "open cuda";

/// Functions that this crate calls, all of them in drivers since CUDA 11.4.
const FUNCTIONS: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemsetD8Async",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuPointerGetAttribute",
    "cuMemGetAddressRange_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamGetCtx",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuGraphInstantiateWithFlags",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphLaunch",
    "cuGraphUpload",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuGetErrorString",
];

/// Functions of memory pools.
const POOL_FUNCTIONS: &[&str] = &[
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemPoolSetAttribute",
    "cuMemPoolGetAttribute",
    "cuMemAllocFromPoolAsync",
    "cuMemFreeAsync",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(capability: u32) -> Facts {
        Facts {
            card: "Card".into(),
            multiprocessors: 100,
            capability,
            memory: 1 << 30,
            shared_bytes_max: 101_376,
        }
    }

    #[test]
    fn old_devices_are_refused_with_the_reason() {
        assert!(require_capability(&facts(80)).is_ok());
        assert!(require_capability(&facts(120)).is_ok());
        let error = require_capability(&facts(75)).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::Unsupported);
        assert!(
            error.to_string().contains("Card has compute capability 7.5, at least 8.0 is needed")
        );
    }

    #[test]
    fn unknown_ordinals_are_refused() {
        assert_eq!(require_ordinal(1, 2).unwrap(), 1);
        for (ordinal, count, words) in [
            (0, 0, "sees no device"),
            (2, 2, "no device 2: the driver sees 2"),
            (u32::MAX, 2, "no device 4294967295"),
        ] {
            let error = require_ordinal(ordinal, count).unwrap_err();
            assert_eq!(error.kind(), DeviceErrorKind::Unsupported);
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
