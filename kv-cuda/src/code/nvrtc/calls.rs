//! The functions of NVRTC's library: names, types, error words.
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;

use libloading::Library;

use super::{CompileError, loader_error, no_compiler};

pub(super) type RawProgram = NonNull<c_void>;
pub(super) type Size = unsafe extern "C" fn(RawProgram, *mut usize) -> c_int;
pub(super) type Bytes = unsafe extern "C" fn(RawProgram, *mut c_char) -> c_int;

/// Functions of the library, as `nvrtc.h` declares them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Calls {
    pub(super) error: unsafe extern "C" fn(c_int) -> *const c_char,
    pub(super) version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    pub(super) num_archs: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) archs: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) create: unsafe extern "C" fn(
        *mut Option<RawProgram>,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    pub(super) destroy: unsafe extern "C" fn(*mut Option<RawProgram>) -> c_int,
    pub(super) compile: unsafe extern "C" fn(RawProgram, c_int, *const *const c_char) -> c_int,
    pub(super) log_size: Size,
    pub(super) log: Bytes,
    pub(super) cubin_size: Size,
    pub(super) cubin: Bytes,
    pub(super) ptx_size: Size,
    pub(super) ptx: Bytes,
}

impl Calls {
    pub(super) fn find(library: &Library) -> Result<Self, CompileError> {
        Ok(Self {
            // SAFETY: the fields have the types that `nvrtc.h` declares, unchanged since CUDA 11.1,
            // which introduced the newest of them.
            error: unsafe { find(library, "nvrtcGetErrorString") }?,
            // SAFETY: as above.
            version: unsafe { find(library, "nvrtcVersion") }?,
            // SAFETY: as above.
            num_archs: unsafe { find(library, "nvrtcGetNumSupportedArchs") }?,
            // SAFETY: as above.
            archs: unsafe { find(library, "nvrtcGetSupportedArchs") }?,
            // SAFETY: as above.
            create: unsafe { find(library, "nvrtcCreateProgram") }?,
            // SAFETY: as above.
            destroy: unsafe { find(library, "nvrtcDestroyProgram") }?,
            // SAFETY: as above.
            compile: unsafe { find(library, "nvrtcCompileProgram") }?,
            // SAFETY: as above.
            log_size: unsafe { find(library, "nvrtcGetProgramLogSize") }?,
            // SAFETY: as above.
            log: unsafe { find(library, "nvrtcGetProgramLog") }?,
            // SAFETY: as above.
            cubin_size: unsafe { find(library, "nvrtcGetCUBINSize") }?,
            // SAFETY: as above.
            cubin: unsafe { find(library, "nvrtcGetCUBIN") }?,
            // SAFETY: as above.
            ptx_size: unsafe { find(library, "nvrtcGetPTXSize") }?,
            // SAFETY: as above.
            ptx: unsafe { find(library, "nvrtcGetPTX") }?,
        })
    }

    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), CompileError> {
        if code == 0 {
            return Ok(());
        }
        Err(CompileError::Failed { call, reason: self.word(code) })
    }

    /// Returns the library's name of an error.
    pub(super) fn word(&self, code: c_int) -> String {
        // SAFETY: any number is allowed.
        let word = unsafe { (self.error)(code) };
        if word.is_null() {
            return format!("error {code}");
        }
        // SAFETY: a string constant of the library, which stays loaded.
        unsafe { CStr::from_ptr(word) }.to_string_lossy().into_owned()
    }

    pub(super) fn capabilities(&self) -> Result<Vec<u32>, CompileError> {
        let mut count = 0;
        // SAFETY: the pointer is valid for writes.
        let code = unsafe { (self.num_archs)(&raw mut count) };
        self.check("nvrtcGetNumSupportedArchs", code)?;
        let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the buffer has the length that the library has just returned.
        let code = unsafe { (self.archs)(archs.as_mut_ptr()) };
        self.check("nvrtcGetSupportedArchs", code)?;
        Ok(archs.into_iter().filter_map(|arch| u32::try_from(arch).ok()).collect())
    }
}

/// # Safety
/// 1. `T` is the type of the function of this name.
unsafe fn find<T: Copy>(library: &Library, name: &str) -> Result<T, CompileError> {
    // SAFETY: condition 1.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|error| no_compiler(loader_error(&error)))
}
