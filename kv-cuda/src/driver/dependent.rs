//! Launches that may begin before the kernel before them on the stream has ended (programmatic
//! dependent launch): a thread block starts as soon as there is room for it, and waits in its first
//! instruction, so that the start of a kernel costs nothing while the one before still runs.
//!
//! Every kernel waits before it reads or writes memory, and lets the next one start as soon as all
//! of its own thread blocks have (`KV_KERNEL` in `kernels/dev.h`). Its end then means the end of
//! everything before it on the stream, whatever is before or behind:
//!
//! - after a copy, a memset or a wait for an event, the driver starts the launch as any other: only
//!   the order after a kernel directly before is relaxed;
//! - a kernel of another library before ours that says nothing of this starts ours when its thread
//!   blocks end, and ours waits for its memory; one that starts ours early is waited for as well;
//! - a kernel of another library behind ours that is launched as usual starts after ours has ended;
//!   one that is launched like ours waits for ours, which has waited for all before.
//!
//! What breaks this is a kernel of another library that is launched like ours and ends without the
//! wait: a kernel of ours behind it would not wait for those before it. A program that has one
//! switches these launches off ([`CudaOptions::with_dependent_launches`]).
//!
//! [`CudaOptions::with_dependent_launches`]: super::CudaOptions::with_dependent_launches
use std::env;
use std::ffi::{c_int, c_uint};
use std::sync::OnceLock;

use cudarc::driver::sys::CUresult;

use super::error::DriverError;
use super::facts::Driver;
use super::library::LaunchEx;
use super::options::CudaOptions;
use crate::code::Arch;

/// Environment variable: `0` switches dependent launches off.
const SETTING: &str = "KV_CUDA_DEPENDENT_LAUNCHES";

/// The reason for which kernels are launched one after another.
pub(super) type Refusal = &'static str;

const SWITCHED_OFF: Refusal = "switched off by an option or KV_CUDA_DEPENDENT_LAUNCHES";
const NO_CALL: Refusal = "the driver has no cuLaunchKernelEx";
const OLD_DRIVER: Refusal = "the driver is older than CUDA 12.3, whose graphs cannot hold them";
const PTX: Refusal = "the code is PTX, which may lack the instruction that waits";
const OLD_CODE: Refusal = "the code is for a compute capability below 9.0, which has none";

/// The oldest driver whose captures keep such launches.
const DRIVER_MIN: u32 = 12_030;
/// The oldest compute capability that has them.
const CAPABILITY_MIN: u32 = 90;

/// Decides whether a kernel of this code may be launched before the previous one has ended.
fn decide(is_wanted: bool, has_call: bool, driver: u32, code: Arch) -> Result<(), Refusal> {
    match () {
        () if !is_wanted => Err(SWITCHED_OFF),
        () if !has_call => Err(NO_CALL),
        () if driver < DRIVER_MIN => Err(OLD_DRIVER),
        () if code.is_ptx() => Err(PTX),
        () if code.capability() < CAPABILITY_MIN => Err(OLD_CODE),
        () => Ok(()),
    }
}

/// The dependent launches of one device.
#[derive(Debug)]
pub(super) struct Dependent {
    is_wanted: bool,
    driver: u32,
    call: Option<LaunchEx>,
    /// The driver's error, if it refused such a launch and took the same one without the attribute.
    refused: OnceLock<String>,
}

impl Dependent {
    pub(super) fn new(driver: Driver, options: &CudaOptions) -> Self {
        let of_user = || env::var_os(SETTING).is_none_or(|value| value != "0");
        Self {
            is_wanted: options.dependent_launches.unwrap_or_else(of_user),
            driver: driver.version,
            call: driver.optional.launch_ex,
            refused: OnceLock::new(),
        }
    }

    /// Decides for kernels of some code.
    pub(super) fn decide(&self, code: Arch) -> Result<(), Refusal> {
        decide(self.is_wanted, self.call.is_some(), self.driver, code)
    }

    /// Returns the driver's call for a kernel for which [`Self::decide`] has decided; `None` if it
    /// is launched as usual.
    pub(super) fn call(&self, decided: Result<(), Refusal>) -> Option<LaunchEx> {
        self.call.filter(|_| decided.is_ok() && self.refused.get().is_none())
    }

    /// Notes that the driver refuses such launches, and not this one alone.
    pub(super) fn refuse(&self, code: CUresult) {
        self.refused.get_or_init(|| DriverError(code).to_string());
    }

    /// Returns the reason for which kernels of this code are launched as usual, if they are.
    pub(super) fn refusal(&self, code: Arch) -> Option<String> {
        let of_driver = || self.refused.get().map(|said| format!("the driver refused one: {said}"));
        self.decide(code).err().map(str::to_owned).or_else(of_driver)
    }
}

/// `CUlaunchAttribute`. The value is a union of 64 bytes that begins with a number.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(8))]
pub(super) struct Attribute {
    id: c_uint,
    pad: c_uint,
    value: c_int,
    rest: [c_uint; 15],
}

impl Attribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: allowed.
    pub(super) const DEPENDENT: Self = Self { id: 6, pad: 0, value: 1, rest: [0; 15] };
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;

    use cudarc::driver::sys::CUfunction;

    use super::super::library::LaunchConfig;
    use super::*;

    #[test]
    fn each_row_has_its_reason() {
        let arch = |name: &str| name.parse::<Arch>().unwrap();
        for (is_wanted, has_call, driver, code, expected) in [
            (true, true, 13_000, "sm_90a", Ok(())),
            (true, true, 12_030, "sm_90", Ok(())),
            (true, true, 13_000, "sm_100a", Ok(())),
            (true, true, 13_000, "sm_120", Ok(())),
            (false, true, 13_000, "sm_90a", Err(SWITCHED_OFF)),
            (true, false, 13_000, "sm_90a", Err(NO_CALL)),
            (true, true, 12_020, "sm_90a", Err(OLD_DRIVER)),
            (true, true, 13_000, "compute_80", Err(PTX)),
            (true, true, 13_000, "compute_90", Err(PTX)),
            (true, true, 13_000, "sm_89", Err(OLD_CODE)),
            (true, true, 13_000, "sm_80", Err(OLD_CODE)),
        ] {
            let decided = decide(is_wanted, has_call, driver, arch(code));
            assert_eq!(decided, expected, "{is_wanted} {has_call} {driver} {code}");
        }
    }

    /// Takes every launch.
    unsafe extern "C" fn launch(
        _: *const LaunchConfig,
        _: CUfunction,
        _: *mut *mut c_void,
        _: *mut *mut c_void,
    ) -> CUresult {
        CUresult::CUDA_SUCCESS
    }

    #[test]
    fn a_refusal_of_the_driver_is_kept_and_named() {
        let dependent = Dependent::new(Driver::default(), &CudaOptions::default());
        let dependent = Dependent { is_wanted: true, driver: 13_000, ..dependent };
        let code: Arch = "sm_90a".parse().unwrap();
        assert_eq!(dependent.refusal(code).unwrap(), NO_CALL);
        let dependent = Dependent { call: Some(launch), ..dependent };
        assert_eq!(dependent.refusal(code), None);
        assert!(dependent.call(Ok(())).is_some() && dependent.call(Err(PTX)).is_none());
        dependent.refuse(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        assert!(dependent.call(Ok(())).is_none());
        let reason = dependent.refusal(code).unwrap();
        assert!(reason.contains("CUDA_ERROR_NOT_SUPPORTED"), "{reason}");
    }

    #[test]
    fn an_option_counts_more_than_the_environment() {
        for is_wanted in [false, true] {
            let options = CudaOptions::default().with_dependent_launches(is_wanted);
            assert_eq!(Dependent::new(Driver::default(), &options).is_wanted, is_wanted);
        }
    }

    #[test]
    fn an_attribute_lies_as_the_driver_reads_it() {
        assert_eq!((size_of::<Attribute>(), align_of::<Attribute>()), (72, 8));
        assert_eq!(std::mem::offset_of!(Attribute, value), 8);
    }
}
