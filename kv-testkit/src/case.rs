//! Conformance cases and their outcomes.
use std::fmt;

use kv_core::CacheError;
use kv_core::backend::AnyBackend;
use kv_core::error::{DeviceError, DeviceErrorKind, PlanError, SpecError};

use crate::device::Device;

/// The outcome of a case that did not fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The contract holds.
    Holds,
    /// The device lacks an ability that the case needs; shown as ignored, never as passed.
    Unsupported(String),
}

/// One named guarantee of the contract.
#[derive(Debug, Clone, Copy)]
pub struct Case<B: Device = AnyBackend> {
    /// `area/what_must_hold`.
    pub name: &'static str,
    /// Checks the guarantee on an opened device.
    pub run: fn(&B) -> CaseResult,
}

/// Result of a case.
pub(crate) type CaseResult = Result<Outcome, CaseError>;

/// The reason why a case failed.
#[derive(Debug)]
pub enum CaseError {
    /// A call returned an error where none is allowed.
    Cache(CacheError),
    /// The guarantee is broken: the expected result and the actual one.
    Broken(String),
}

impl fmt::Display for CaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cache(error) => write!(f, "unexpected error: {error}"),
            Self::Broken(what) => f.write_str(what),
        }
    }
}

impl CaseError {
    /// Returns the device's own explanation if it does not support something.
    pub(crate) fn unsupported(&self) -> Option<String> {
        match self {
            Self::Cache(CacheError::Device(error))
                if error.kind() == DeviceErrorKind::Unsupported =>
            {
                Some(error.to_string())
            }
            _ => None,
        }
    }

    /// Adds the place inside a longer case.
    #[must_use]
    pub(crate) fn at(self, place: impl fmt::Display) -> Self {
        if self.unsupported().is_some() {
            return self;
        }
        Self::Broken(format!("{place}: {self}"))
    }
}

/// Adds the place to an error.
pub(crate) trait At<T> {
    fn at(self, place: impl fmt::Display) -> Result<T, CaseError>;
}

impl<T, E: Into<CaseError>> At<T> for Result<T, E> {
    fn at(self, place: impl fmt::Display) -> Result<T, CaseError> {
        self.map_err(|error| error.into().at(place))
    }
}

impl From<String> for CaseError {
    fn from(what: String) -> Self {
        Self::Broken(what)
    }
}
impl From<&str> for CaseError {
    fn from(what: &str) -> Self {
        Self::Broken(what.to_owned())
    }
}
impl From<CacheError> for CaseError {
    fn from(error: CacheError) -> Self {
        Self::Cache(error)
    }
}
impl From<DeviceError> for CaseError {
    fn from(error: DeviceError) -> Self {
        Self::Cache(error.into())
    }
}
impl From<PlanError> for CaseError {
    fn from(error: PlanError) -> Self {
        Self::Cache(error.into())
    }
}
impl From<kv_core::calibration::CalibrationError> for CaseError {
    fn from(error: kv_core::calibration::CalibrationError) -> Self {
        Self::Cache(error.into())
    }
}
impl From<SpecError> for CaseError {
    fn from(error: SpecError) -> Self {
        Self::Cache(error.into())
    }
}

/// Fails with `what` unless `holds` is true.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), CaseError> {
    if holds { Ok(()) } else { Err(CaseError::Broken(what())) }
}

/// Fails unless both values are equal.
#[expect(clippy::needless_pass_by_value, reason = "callers make both for this call")]
pub(crate) fn same<T: PartialEq + fmt::Debug>(
    what: impl fmt::Display,
    got: T,
    expected: T,
) -> Result<(), CaseError> {
    ensure(got == expected, || format!("{what}: expected {expected:?}, got {got:?}"))
}

/// Matches device errors of one kind.
pub(crate) fn device_error(kind: DeviceErrorKind) -> impl Fn(&CacheError) -> bool + Copy {
    move |error| matches!(error, CacheError::Device(device) if device.kind() == kind)
}

/// Fails unless the call was refused with an error that `fits` accepts.
pub(crate) fn refused<T>(
    what: impl fmt::Display,
    result: Result<T, impl Into<CacheError>>,
    fits: impl FnOnce(&CacheError) -> bool,
) -> Result<(), CaseError> {
    match result {
        Ok(_) => Err(CaseError::Broken(format!("{what}: accepted, a typed refusal was expected"))),
        Err(error) => {
            let error = error.into();
            ensure(fits(&error), || format!("{what}: refused for another reason: {error:?}"))
        }
    }
}
