//! Bad input: refused with a typed error before anything changes.
use kv_core::backend::{AnyBackend, Backend, NullBackend, Queue};
use kv_core::error::{DeviceErrorKind, PlanError};
use kv_core::{AttentionOptions, Axes, CacheError, DType, StepInput, TensorView, TensorViewMut};

use super::{case, small};
use crate::case::{Case, CaseError, CaseResult, Outcome, device_error, ensure, refused};
use crate::device::{Device, Place, Shared};
use crate::fixture::{CacheFixture, StepConfig, StepKind, seq, unchanged};

/// The case that also runs on the backend's own type.
pub(super) fn typed_cases<B: Device>() -> Vec<Case<B>> {
    vec![case("erased/downcast", downcast)]
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("failure/bad_tensors_of_a_write", bad_writes),
        case("failure/bad_tensors_of_attention", bad_attends),
        case("failure/bad_options", bad_options),
        case("failure/device_ranges", device_ranges),
        case("erased/foreign_handle", foreign),
        case("erased/wrapped_and_erased_again", twice),
    ]
}

type Matches = fn(&PlanError) -> bool;

/// A malformed tensor and the error for it.
struct Malformed<'a> {
    what: &'a str,
    dtype: DType,
    bytes: &'a [u8],
    dims: &'a [u32],
    strides: Option<[u64; 2]>,
    fits: Matches,
}

impl Malformed<'_> {
    fn view<Buf>(&self) -> TensorView<'_, Buf> {
        let view = TensorView::host_bytes(self.dtype, self.bytes, self.dims);
        match self.strides {
            Some(strides) => view.with_outer_strides(strides),
            None => view,
        }
    }
}

/// Malformed tensors for 3 tokens of 2 heads of 8 values, in `thd`.
fn malformed_tensors(bytes: &[u8]) -> Vec<Malformed<'_>> {
    let bad = |what, dims, len, fits| {
        let bytes = &bytes[..len];
        Malformed { what, dtype: DType::F32, bytes, dims, strides: None, fits }
    };
    let shape: Matches = |e| matches!(e, PlanError::Shape { .. });
    let short: Matches = |e| matches!(e, PlanError::TensorBytes { .. });
    let kind: Matches = |e| matches!(e, PlanError::ElementType { .. });
    let align: Matches = |e| matches!(e, PlanError::Misaligned { .. });
    vec![
        bad("two rows", &[2, 2, 8], 4096, shape),
        bad("another dim", &[3, 2, 4], 4096, shape),
        bad("two axes", &[3, 16], 4096, shape),
        bad("four axes", &[1, 3, 2, 8], 4096, shape),
        bad("no axis", &[], 4096, shape),
        bad("five axes", &[1, 1, 3, 2, 8], 4096, shape),
        bad("a byte missing", &[3, 2, 8], 191, short),
        bad("no bytes", &[3, 2, 8], 0, short),
        bad("a row too many for its bytes", &[u32::MAX, 2, 8], 4096, short),
        Malformed { strides: Some([20, 0]), ..bad("strides past the end", &[3, 2, 8], 220, short) },
        Malformed {
            strides: Some([u64::MAX, 0]),
            ..bad("endless strides", &[3, 2, 8], 4096, short)
        },
        Malformed { dtype: DType::U32, ..bad("integers", &[3, 2, 8], 4096, kind) },
        Malformed { bytes: &bytes[1..194], ..bad("an odd address", &[3, 2, 8], 0, align) },
        Malformed {
            bytes: &bytes[1..98],
            dtype: DType::F16,
            ..bad("an odd address of f16", &[3, 2, 8], 0, align)
        },
    ]
}

/// Memory for malformed tensors, aligned for every element.
fn memory() -> Vec<u64> {
    vec![0; 600]
}

fn expect(what: &str, result: Result<(), CacheError>, fits: Matches) -> Result<(), CaseError> {
    refused(what, result, |error| matches!(error, CacheError::Plan(error) if fits(error)))
}

fn bad_writes(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 1)?;
    fixture.fill(1, 6)?;
    let before = fixture.state();
    let memory = memory();
    let good = vec![0.0_f32; 48];
    let good = TensorView::host(&good, &[3, 2, 8]);
    let mut step = fixture.cache.begin_step(&[StepInput::count(seq(1), 3)])?;
    let tensors = malformed_tensors(bytemuck::cast_slice(&memory));
    let shape: Matches = |e| matches!(e, PlanError::Shape { .. });
    let heads = TensorView::host_bytes(DType::F32, bytemuck::cast_slice(&memory), &[3, 1, 8]);
    expect("other heads", step.write(0, heads, good, Axes::Thd), shape)?;
    for bad in &tensors {
        let format = Axes::Thd;
        let what = bad.what;
        expect(&format!("k with {what}"), step.write(0, bad.view(), good, format), bad.fits)?;
        expect(&format!("v with {what}"), step.write(0, good, bad.view(), format), bad.fits)?;
    }
    for format in [Axes::Bshd, Axes::Sbhd] {
        expect("three axes", step.write(0, good, good, format), shape)?;
    }
    let unknown: Matches = |e| matches!(e, PlanError::UnknownLayer { .. });
    expect("layer 2 of 2", step.write(2, good, good, Axes::Thd), unknown)?;
    step.write(0, good, good, Axes::Thd)?;
    drop(step);
    unchanged(&mut fixture, &before, "refused writes")?;
    Ok(Outcome::Holds)
}

fn bad_attends(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 2)?;
    fixture.fill(1, 6)?;
    let before = fixture.state();
    let memory = memory();
    let device = fixture.backend.clone();
    let buffer = device.alloc(4096)?;
    let good = vec![0.0_f32; 48];
    let good = TensorView::host(&good, &[3, 2, 8]);
    let out = |dims: &[u32]| TensorViewMut::device(DType::F32, &buffer, 0, dims);
    let options = AttentionOptions::causal(1.0);
    let mut step = fixture.cache.begin_step(&[StepInput::query(seq(1), 3)])?;
    for bad in malformed_tensors(bytemuck::cast_slice(&memory)) {
        let what = format!("q with {}", bad.what);
        expect(&what, step.attend(0, bad.view(), out(&[3, 2, 8]), &options), bad.fits)?;
    }
    let shape: Matches = |e| matches!(e, PlanError::Shape { .. });
    for dims in [&[2, 2, 8][..], &[3, 1, 8], &[3, 2, 4], &[3, 16], &[3, 4, 8]] {
        expect("out of another shape", step.attend(0, good, out(dims), &options), shape)?;
    }
    let heads: Matches = |e| matches!(e, PlanError::HeadsNotDivisible { q_heads: 3, kv_heads: 2 });
    let three = vec![0.0_f32; 72];
    let three = TensorView::host(&three, &[3, 3, 8]);
    expect("three query heads", step.attend(0, three, out(&[3, 3, 8]), &options), heads)?;
    let kind: Matches = |e| matches!(e, PlanError::ElementType { .. });
    let half = TensorViewMut::device(DType::F16, &buffer, 0, &[3, 2, 8]);
    expect("out of another type than q", step.attend(0, good, half, &options), kind)?;
    let align: Matches = |e| matches!(e, PlanError::Misaligned { .. });
    let odd = TensorViewMut::device(DType::F32, &buffer, 2, &[3, 2, 8]);
    expect("out at an odd offset", step.attend(0, good, odd, &options), align)?;
    let overlap: Matches = |e| matches!(e, PlanError::Overlap { .. });
    for stride in [0, 1, 15] {
        let out = out(&[3, 2, 8]).with_outer_strides([stride, 0]);
        expect("rows of out that overlap", step.attend(0, good, out, &options), overlap)?;
    }
    let lse = |dtype, dims: &[u32]| TensorViewMut::device(dtype, &buffer, 1024, dims);
    let mut with = |lse| step.attend_lse(0, good, out(&[3, 2, 8]), lse, &options);
    expect("lse of another shape", with(lse(DType::F32, &[3, 4])), shape)?;
    expect("lse with a dim", with(lse(DType::F32, &[3, 2, 8])), shape)?;
    expect("lse in f16", with(lse(DType::F16, &[3, 2])), kind)?;
    with(lse(DType::F32, &[3, 2]))?;
    drop(step);
    unchanged(&mut fixture, &before, "refused attention")?;
    Ok(Outcome::Holds)
}

fn bad_options(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 3)?;
    fixture.fill(1, 6)?;
    let buffer = backend.alloc(64)?;
    let good = [0.0_f32; 16];
    let good = TensorView::host(&good, &[1, 2, 8]);
    let mut step = fixture.cache.begin_step(&[StepInput::query(seq(1), 1)])?;
    let mut attend = |options: AttentionOptions<'_>| {
        let out = TensorViewMut::device(DType::F32, &buffer, 0, &[1, 2, 8]);
        step.attend(0, good, out, &options)
    };
    let option: Matches = |e| matches!(e, PlanError::Option { .. });
    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        expect("a scale", attend(AttentionOptions::causal(scale)), option)?;
    }
    let base = AttentionOptions::causal(1.0);
    for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        expect("a cap", attend(base.with_soft_cap(cap)), option)?;
    }
    expect("sink logits", attend(base.with_sink_logits(&[0.0, f32::NAN])), option)?;
    expect("sink logits", attend(base.with_sink_logits(&[0.0, f32::INFINITY])), option)?;
    let length: Matches = |e| matches!(e, PlanError::LengthMismatch { .. });
    expect("one sink logit", attend(base.with_sink_logits(&[0.0])), length)?;
    expect("three sink logits", attend(base.with_sink_logits(&[0.0; 3])), length)?;
    attend(base.with_sink_logits(&[0.0, f32::NEG_INFINITY]))?;
    Ok(Outcome::Holds)
}

/// A view that reaches past its buffer: only the backend can check it.
fn device_ranges(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 4)?;
    fixture.fill(1, 6)?;
    let before = fixture.state();
    let small = backend.alloc(64)?;
    let large = backend.alloc(1024)?;
    let range = device_error(DeviceErrorKind::OutOfRange);
    let view = |buffer, offset| TensorView::device(DType::F32, buffer, offset, &[3, 2, 8]);
    let mut step = fixture.cache.begin_step(&[StepInput::count(seq(1), 3)])?;
    let format = Axes::Thd;
    let good = view(&large, 0);
    for (what, bad) in [
        ("a buffer that is too small", view(&small, 0)),
        ("an offset that leaves too few bytes", view(&large, 1024 - 188)),
        ("an offset past the end", view(&large, 1 << 40)),
        ("an offset that wraps", view(&large, u64::MAX - 3)),
    ] {
        refused(format!("k in {what}"), step.write(0, bad, good, format), range)?;
        refused(format!("v in {what}"), step.write(0, good, bad, format), range)?;
    }
    step.write(0, good, good, format)?;
    let options = AttentionOptions::causal(1.0);
    let out = |buffer, offset| TensorViewMut::device(DType::F32, buffer, offset, &[3, 2, 8]);
    refused("out", step.attend(0, good, out(&small, 0), &options), range)?;
    refused("out", step.attend(0, good, out(&large, 1000), &options), range)?;
    refused("q", step.attend(0, view(&small, 0), out(&large, 0), &options), range)?;
    drop(step);
    unchanged(&mut fixture, &before, "refused device ranges")?;
    Ok(Outcome::Holds)
}

/// A handle of another backend is refused by every operation that takes one.
fn foreign(backend: &AnyBackend) -> CaseResult {
    let other = AnyBackend::new(NullBackend::new());
    let (stranger, own) = (other.alloc(1024)?, backend.alloc(1024)?);
    let foreign = device_error(DeviceErrorKind::ForeignHandle);
    let mut queue = backend.queue()?;
    refused("upload", queue.upload(&stranger, 0, &[0; 4]), foreign)?;
    refused("download", queue.download(&stranger, 0, 4), foreign)?;
    refused("zero", queue.zero(&stranger, 0, 4), foreign)?;
    let fence = other.queue()?.submit()?;
    refused("wait_for", queue.wait_for(&fence), foreign)?;
    let mut fixture = CacheFixture::new(backend, small().build()?, 6)?;
    fixture.fill(1, 6)?;
    let before = fixture.state();
    let view = |buffer| TensorView::device(DType::F32, buffer, 0, &[3, 2, 8]);
    let out = |buffer| TensorViewMut::device(DType::F32, buffer, 0, &[3, 2, 8]);
    let (format, options) = (Axes::Thd, AttentionOptions::causal(1.0));
    let mut step = fixture.cache.begin_step(&[StepInput::count(seq(1), 3)])?;
    refused("k", step.write(0, view(&stranger), view(&own), format), foreign)?;
    refused("v", step.write(0, view(&own), view(&stranger), format), foreign)?;
    step.write(0, view(&own), view(&own), format)?;
    refused("q", step.attend(0, view(&stranger), out(&own), &options), foreign)?;
    refused("out", step.attend(0, view(&own), out(&stranger), &options), foreign)?;
    drop(step);
    let range = [(seq(1), 0, 3)];
    let gathered =
        fixture.cache.gather(0, kv_core::backend::Plane::Key, &range, out(&stranger), format);
    refused("gather", gathered, foreign)?;
    unchanged(&mut fixture, &before, "refused handles")?;
    Ok(Outcome::Holds)
}

fn downcast<B: Device>(backend: &B) -> CaseResult {
    let any = AnyBackend::new(backend.clone());
    ensure(any.name() == backend.name(), || format!("erased name {}", any.name()))?;
    ensure(any.capabilities() == backend.capabilities(), || "erased capabilities".to_owned())?;
    let again = AnyBackend::new(any.clone());
    ensure(again.name() == any.name(), || "a backend erased twice".to_owned())?;
    let null = AnyBackend::new(NullBackend::new());
    ensure(null.downcast_ref::<NullBackend>().is_some(), || {
        "the backend under the erasure is lost".to_owned()
    })?;
    ensure(any.downcast_ref::<NullBackend>().is_none(), || "downcast to another type".to_owned())?;
    Ok(Outcome::Holds)
}

/// A backend that wraps an erased one works like any other.
fn twice(backend: &AnyBackend) -> CaseResult {
    let nested = AnyBackend::new(Shared::new(backend.clone()));
    let mut fixture = CacheFixture::new(&nested, small().build()?, 7)?;
    fixture.fill(1, 6)?;
    fixture.fork(1, 2)?;
    let inputs = [(1, StepKind::Tokens(2)), (2, StepKind::Tokens(1))];
    fixture.step(&inputs, &StepConfig { outputs: Place::Host, ..StepConfig::default() })?;
    fixture.check()?;
    Ok(Outcome::Holds)
}
