//! Bindings of the emulator's library.
use std::ffi::{CString, c_char, c_int, c_void};
use std::fmt;
use std::path::Path;

use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::gpu::Launch;

type LaunchFn = unsafe extern "C" fn(
    launches: *const EmulatedLaunch,
    count: u32,
    error: *mut c_char,
    error_bytes: u32,
) -> c_int;

/// `KvEmuLaunch`.
#[repr(C)]
struct EmulatedLaunch {
    name: *const c_char,
    params: *const c_void,
    grid: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    params_bytes: u32,
    seed: u32,
}
#[cfg(test)]
type KernelsFn = unsafe extern "C" fn(names: *mut *const c_char, max: u32) -> u32;
#[cfg(test)]
type SizeofFn = unsafe extern "C" fn(struct_name: *const c_char) -> u32;

/// The loaded library. Several threads may call its functions.
pub(super) struct Library {
    launch: LaunchFn,
    #[cfg(test)]
    kernels: KernelsFn,
    #[cfg(test)]
    sizeof: SizeofFn,
    /// Keeps the functions above loaded.
    _loaded: libloading::Library,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

impl Library {
    /// Loads the library and finds its functions.
    pub(super) fn load(path: &Path) -> Result<Self, DeviceError> {
        let unsupported = |error: libloading::Error| {
            let path = path.display();
            let detail = format!("cannot load {path}; `cargo xtask emulator` builds it");
            DeviceError::new(DeviceErrorKind::Unsupported, "open")
                .with_detail(detail)
                .with_source(error)
        };
        // SAFETY: the initialisers of the emulator's library only register its kernels. Whoever
        // names the file (`EmulatorOptions::with_library`) guarantees that it is that library.
        let library = unsafe { libloading::Library::new(path) }.map_err(unsupported)?;
        // SAFETY: the function of this name in kernels/emulator/abi.cpp has this signature.
        let launch =
            *unsafe { library.get::<LaunchFn>(b"kv_emu_launch_chain") }.map_err(unsupported)?;
        #[cfg(test)]
        // SAFETY: the function of this name in kernels/emulator/abi.cpp has this signature.
        let kernels =
            *unsafe { library.get::<KernelsFn>(b"kv_emu_kernels") }.map_err(unsupported)?;
        #[cfg(test)]
        // SAFETY: the function of this name in kernels/emulator/abi.cpp has this signature.
        let sizeof = *unsafe { library.get::<SizeofFn>(b"kv_emu_sizeof") }.map_err(unsupported)?;
        Ok(Self {
            launch,
            #[cfg(test)]
            kernels,
            #[cfg(test)]
            sizeof,
            _loaded: library,
        })
    }

    /// Runs kernels with their parameters and seeds one after another, to their ends. Each may
    /// begin before the previous one has run, for which it then waits.
    ///
    /// # Errors
    /// `Driver`, with the emulator's message, for a launch that it refuses or that fails.
    ///
    /// # Safety
    /// 1. Parameters are those of their kernels, and every address in them points to memory as
    ///    large as the kernel uses.
    pub(super) unsafe fn launch(&self, all: &[(Launch, &[u8], u32)]) -> Result<(), DeviceError> {
        let failed = |detail: String| {
            DeviceError::new(DeviceErrorKind::Driver, "launch").with_detail(detail)
        };
        let names = all.iter().map(|(launch, ..)| CString::new(launch.kernel));
        let names = names.collect::<Result<Vec<_>, _>>().map_err(|e| failed(e.to_string()))?;
        let length = |bytes: usize| u32::try_from(bytes).map_err(|error| failed(error.to_string()));
        let launch = |(name, (launch, params, seed)): (&CString, &(Launch, &[u8], u32))| {
            let Launch { grid, threads, shared_bytes, .. } = *launch;
            let (params_bytes, seed) = (length(params.len())?, *seed);
            let (name, params) = (name.as_ptr(), params.as_ptr().cast());
            let launch =
                EmulatedLaunch { name, params, grid, threads, shared_bytes, params_bytes, seed };
            Ok(launch)
        };
        let launches =
            names.iter().zip(all).map(launch).collect::<Result<Vec<_>, DeviceError>>()?;
        let count = length(launches.len())?;
        let mut text = [0_u8; 1024];
        let text_bytes = u32::try_from(text.len()).unwrap_or(0);
        // SAFETY: names end with a zero, parameters, `launches` and `text` have the lengths that
        // are passed; condition 1 covers what the kernels do with their parameters.
        let code = unsafe {
            (self.launch)(launches.as_ptr(), count, text.as_mut_ptr().cast(), text_bytes)
        };
        if code == 0 {
            return Ok(());
        }
        let text = text.split(|byte| *byte == 0).next().unwrap_or(&[]);
        Err(failed(String::from_utf8_lossy(text).into_owned()))
    }

    /// Lists the kernels.
    #[cfg(test)]
    pub(super) fn kernels(&self) -> Vec<String> {
        // SAFETY: with space for 0 names it writes none.
        let count = unsafe { (self.kernels)(std::ptr::null_mut(), 0) };
        let mut names = vec![std::ptr::null::<c_char>(); usize::try_from(count).unwrap()];
        // SAFETY: `names` has room for `count` names.
        unsafe { (self.kernels)(names.as_mut_ptr(), count) };
        let name = |name: *const c_char| {
            // SAFETY: names are literals of the library, which `self` keeps loaded.
            unsafe { std::ffi::CStr::from_ptr(name) }.to_str().unwrap().to_owned()
        };
        names.into_iter().map(name).collect()
    }

    /// Returns the bytes of a structure of `params.h`; 0 for an unknown one.
    #[cfg(test)]
    pub(super) fn sizeof(&self, name: &str) -> usize {
        let name = CString::new(name).unwrap();
        // SAFETY: the name ends with a zero.
        let bytes = unsafe { (self.sizeof)(name.as_ptr()) };
        usize::try_from(bytes).unwrap()
    }
}
