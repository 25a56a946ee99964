//! The driver's library, and its functions that are called by their address.
//!
//! cudarc declares the functions of one CUDA version, which another crate of the program may
//! choose, candle for example. Functions that older versions lack are declared here, so that this
//! crate compiles with any version, and are called if the driver has them.
use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{CUdeviceptr, CUfunction, CUmemLocation, CUresult, CUstream};
use libloading::Library;

use super::dependent::Attribute;

/// Returns the driver's library, `None` without a driver.
pub(super) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    // SAFETY: runs the initialisers of NVIDIA's library, which have no preconditions.
    let open = || NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
    LIBRARY.get_or_init(open).as_ref()
}

/// Returns whether the library exports a function.
pub(super) fn exports(library: &Library, name: &str) -> bool {
    // SAFETY: the symbol is not used, so its type does not matter.
    unsafe { library.get::<*const ()>(name.as_bytes()) }.is_ok()
}

/// Copies many ranges: `cuMemcpyBatchAsync_v2`, CUDA 13.0.
///
/// # Safety
/// Of calls: lists of targets, sources and sizes with as many items as the fourth argument says,
/// each range valid until the stream has reached the copy; attributes and the index of the first
/// copy that each is for, with as many items as the seventh argument says; a live stream.
pub(super) type CopyBatch = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    CUstream,
) -> CUresult;

/// Returns offset and size of a kernel's parameter: `cuFuncGetParamInfo`, CUDA 12.4.
///
/// # Safety
/// Of calls: a function of a loaded module, and places for two sizes.
pub(super) type ParamInfo =
    unsafe extern "C" fn(CUfunction, usize, *mut usize, *mut usize) -> CUresult;

/// Launches a kernel with attributes: `cuLaunchKernelEx`, CUDA 11.8.
///
/// # Safety
/// Of calls: a configuration with as many attributes as it says and a live stream; a function of a
/// loaded module, and a list of pointers to its parameters.
pub(super) type LaunchEx = unsafe extern "C" fn(
    *const LaunchConfig,
    CUfunction,
    *mut *mut c_void,
    *mut *mut c_void,
) -> CUresult;

/// `CUlaunchConfig`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) threads: [c_uint; 3],
    pub(super) shared_bytes: c_uint,
    pub(super) stream: CUstream,
    pub(super) attributes: *const Attribute,
    pub(super) num_attributes: c_uint,
}

/// `CUmemcpyAttributes`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct CopyAttributes {
    pub(super) source_order: c_uint,
    pub(super) from: Location,
    pub(super) to: Location,
    pub(super) flags: c_uint,
}

/// `CUmemLocation`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Location {
    kind: c_uint,
    id: c_int,
}

impl Location {
    /// `CU_MEM_LOCATION_TYPE_HOST`.
    pub(super) const HOST: Self = Self { kind: 2, id: 0 };

    /// `CU_MEM_LOCATION_TYPE_DEVICE`.
    pub(super) const fn device(id: c_int) -> Self {
        Self { kind: 1, id }
    }
}

/// Sets cudarc's location to a device. Its fields have other names from CUDA 13.2 on.
pub(super) fn set_device(place: &mut CUmemLocation, id: c_int) {
    const {
        assert!(size_of::<Location>() == size_of::<CUmemLocation>());
        assert!(align_of::<Location>() == align_of::<CUmemLocation>());
    }
    // SAFETY: a place of this size and alignment, of the same type in C; every version has this
    // kind.
    unsafe { std::ptr::from_mut(place).cast::<Location>().write(Location::device(id)) };
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read in the order of the stream.
pub(super) const STREAM_ORDER: c_uint = 1;

/// The functions that this crate calls by their address.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Optional {
    pub(super) copy_batch: Option<CopyBatch>,
    pub(super) param_info: Option<ParamInfo>,
    pub(super) launch_ex: Option<LaunchEx>,
}

impl Optional {
    /// Finds the functions that a driver has.
    pub(super) fn of(library: &'static Library) -> Self {
        // SAFETY: the type is that of the function since the version with this name.
        let copy_batch = unsafe { library.get::<CopyBatch>(b"cuMemcpyBatchAsync_v2") };
        // SAFETY: the same.
        let param_info = unsafe { library.get::<ParamInfo>(b"cuFuncGetParamInfo") };
        // SAFETY: the same.
        let launch_ex = unsafe { library.get::<LaunchEx>(b"cuLaunchKernelEx") };
        Self {
            copy_batch: copy_batch.ok().map(|found| *found),
            param_info: param_info.ok().map(|found| *found),
            launch_ex: launch_ex.ok().map(|found| *found),
        }
    }
}

/// Names under which cudarc looks for the library too: it panics where it finds none.
const NAMES: &[&str] =
    if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_lie_as_the_driver_reads_them() {
        assert_eq!(size_of::<Location>(), 8);
        assert_eq!(size_of::<CopyAttributes>(), 24);
        assert_eq!(std::mem::offset_of!(CopyAttributes, from), 4);
        assert_eq!(std::mem::offset_of!(CopyAttributes, to), 12);
        assert_eq!(std::mem::offset_of!(CopyAttributes, flags), 20);
        assert_eq!(size_of::<LaunchConfig>(), 56);
        assert_eq!(std::mem::offset_of!(LaunchConfig, shared_bytes), 24);
        assert_eq!(std::mem::offset_of!(LaunchConfig, stream), 32);
        assert_eq!(std::mem::offset_of!(LaunchConfig, attributes), 40);
        assert_eq!(std::mem::offset_of!(LaunchConfig, num_attributes), 48);
    }
}
