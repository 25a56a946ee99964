//! Changes of axes and element types of plain tensors, and conversions to and from stored rows.
mod stored;

use kv_core::backend::Queue;
use kv_core::error::PlanError;
use kv_core::plan::{ConvertArgs, ConvertPlan};
use kv_core::{Axes, CacheError, DType};

use super::case;
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, refused};
use crate::device::{Device, Place, Staged};
use crate::fixture::{AXES, DTYPES, check_rows};
use crate::oracle::round::round_f32;
use crate::rng::Rng;
use crate::tokens::{Padding, TokenLayout};

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("convert/nine_axis_pairs", pairs),
        case("convert/nine_dtype_pairs", dtypes),
        case("convert/padding_and_places", paddings),
        case("convert/host_outputs", host_outputs),
        case("convert/refuses_bad_lengths", refusals),
        case("convert/stored_rows", stored::rows),
        case("convert/stored_limits", stored::limits),
        case("convert/stored_refusals", stored::refusals),
    ]
}

/// The form of the source or of the destination.
#[derive(Debug, Clone, Copy)]
pub(crate) struct End {
    pub(crate) axes: Axes,
    pub(crate) dtype: DType,
    pub(crate) padding: Padding,
    pub(crate) place: Place,
}

impl End {
    fn of(axes: Axes, dtype: DType) -> Self {
        Self { axes, dtype, padding: Padding::default(), place: Place::Device }
    }
}

/// Converts `rows` and returns them, after checking the padding.
pub(crate) fn convert<B: Device>(
    backend: &B,
    rows: &[Vec<f32>],
    heads_dim: [usize; 2],
    [from, to]: [End; 2],
) -> Result<Vec<Vec<f32>>, CaseError> {
    let width = heads_dim[0] * heads_dim[1];
    let lens: Vec<_> = rows.iter().map(|rows| rows.len() / width).collect();
    let counts: Vec<_> = lens.iter().map(|len| *len as u32).collect();
    let plan = ConvertPlan::new(&counts)?;
    let mut queue = backend.queue()?;
    let layout = TokenLayout::new(from.axes, &lens, heads_dim, from.padding);
    let tensor = layout.pack(from.dtype, rows, f32::NAN);
    let src = Staged::new(backend, &mut queue, (layout, tensor), from.place)?;
    let layout = TokenLayout::new(to.axes, &lens, heads_dim, to.padding);
    let mut dst = Staged::output(backend, &mut queue, (layout, to.dtype), to.place)?;
    let args = ConvertArgs::new(&plan, (src.view(), from.axes), (dst.view_mut(), to.axes))?;
    queue.convert(&plan, args)?;
    let tensor = dst.read(backend.capabilities(), &mut queue)?;
    Ok(layout.unpack("converted", tensor, &lens, 0.0)?)
}

fn check<B: Device>(
    backend: &B,
    lens: &[usize],
    heads_dim: [usize; 2],
    ends: [End; 2],
) -> Result<(), CaseError> {
    let width = heads_dim[0] * heads_dim[1];
    let mut rng = Rng::new(lens.len() as u64);
    let mut random = |len: &usize| -> Vec<f32> {
        let values = rng.normals(len * width).into_iter();
        values.map(|x| round_f32(ends[0].dtype, x * 100.0)).collect()
    };
    let rows: Vec<_> = lens.iter().map(&mut random).collect();
    let place = || format!("{ends:?}, lengths {lens:?}");
    let got = convert(backend, &rows, heads_dim, ends).at(place())?;
    for (got, expected) in got.iter().zip(&rows) {
        let expected: Vec<_> = expected.iter().map(|x| round_f32(ends[1].dtype, *x)).collect();
        check_rows(got, &expected, width).at(place())?;
    }
    Ok(())
}

fn pairs<B: Device>(backend: &B) -> CaseResult {
    for from in AXES {
        for to in AXES {
            for lens in [&[3, 1, 4][..], &[1], &[0, 2, 0, 5], &[7, 7], &[0], &[]] {
                let ends = [from, to].map(|axes| End::of(axes, DType::F32));
                check(backend, lens, [2, 5], ends)?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn dtypes<B: Device>(backend: &B) -> CaseResult {
    for from in DTYPES {
        for to in DTYPES {
            let ends = [End::of(Axes::Thd, from), End::of(Axes::Bshd, to)];
            check(backend, &[3, 1, 4], [3, 4], ends)?;
            let ends = [End::of(Axes::Sbhd, from), End::of(Axes::Thd, to)];
            check(backend, &[2, 6], [1, 64], ends)?;
        }
    }
    Ok(Outcome::Holds)
}

fn paddings<B: Device>(backend: &B) -> CaseResult {
    let mut rng = Rng::new(3);
    for _ in 0..40 {
        let mut end = || End {
            axes: rng.pick(&AXES),
            dtype: rng.pick(&DTYPES),
            padding: Padding {
                batch: rng.below(3) as usize,
                tokens: rng.below(3) as usize,
                gap: rng.pick(&[0, 0, 1, 8]),
            },
            place: rng.pick(&[Place::Host, Place::Device]),
        };
        let ends = [end(), end()];
        let lens: Vec<_> = (0..rng.within(1, 5)).map(|_| rng.below(6) as usize).collect();
        check(backend, &lens, [rng.within(1, 3) as usize, rng.pick(&[1, 4, 7, 16])], ends)?;
    }
    Ok(Outcome::Holds)
}

/// Rows in host memory equal, to the bit, those that the same call writes to device memory.
fn host_outputs<B: Device>(backend: &B) -> CaseResult {
    let rows: Vec<_> = [3, 1].map(|len| Rng::new(len).normals(len as usize * 8)).into();
    for axes in AXES {
        for dtype in DTYPES {
            let padding = Padding { batch: 1, tokens: 1, gap: 2 };
            let convert = |place| {
                let to = End { axes, dtype, padding, place };
                convert(backend, &rows, [2, 4], [End::of(Axes::Thd, DType::F32), to])
            };
            let [host, device] = [convert(Place::Host)?, convert(Place::Device)?];
            ensure(host == device, || {
                format!("{axes:?} {dtype}: {host:?}, on the device {device:?}")
            })?;
        }
    }
    Ok(Outcome::Holds)
}

fn refusals<B: Device>(backend: &B) -> CaseResult {
    let plan = |e: &CacheError| matches!(e, CacheError::Plan(_));
    refused("sums that fall", ConvertPlan::from_cu_seqlens(&[0, 3, 2]), plan)?;
    refused("sums that do not start at 0", ConvertPlan::from_cu_seqlens(&[1, 3]), plan)?;
    refused("no sums", ConvertPlan::from_cu_seqlens(&[]), plan)?;
    refused("a total past u32", ConvertPlan::new(&[u32::MAX, 1]), plan)?;
    let made = ConvertPlan::new(&[3, 4])?;
    let mut queue = backend.queue()?;
    let mut attempt = |from: [usize; 2], to: [usize; 2], rows: usize| {
        let stage =
            |lens: &[usize], dims| TokenLayout::new(Axes::Thd, lens, dims, Padding::default());
        let src = stage(&[3, rows], from);
        let dst = stage(&[3, 4], to);
        let src = Staged::output(backend, &mut queue, (src, DType::F32), Place::Device)?;
        let mut dst = Staged::output(backend, &mut queue, (dst, DType::F32), Place::Device)?;
        let ends = ((src.view(), Axes::Thd), (dst.view_mut(), Axes::Thd));
        ConvertArgs::new(&made, ends.0, ends.1).map(|_| ()).map_err(CacheError::from)
    };
    let shape = |e: &CacheError| matches!(e, CacheError::Plan(PlanError::Shape { .. }));
    refused("fewer rows than tokens", attempt([2, 4], [2, 4], 3), shape)?;
    refused("other heads", attempt([2, 4], [1, 4], 4), shape)?;
    refused("another dim", attempt([2, 4], [2, 8], 4), shape)?;
    Ok(Outcome::Holds)
}
