//! Reading cached rows back.
use kv_core::backend::Plane;
use kv_core::error::PlanError;
use kv_core::{Axes, CacheError, DType, KvFormat, ScaleGroup, Scaling, SequenceId};

use super::{ORDERS, case, small};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, refused};
use crate::device::{Device, Place, Staged, dim};
use crate::fixture::{AXES, CacheFixture, DTYPES, agree, seq};
use crate::tokens::{Padding, TokenLayout};

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("gather/every_axis_order_and_dtype", forms),
        case("gather/ranges", ranges),
        case("gather/usual_head_dims", usual_head_dims),
        case("gather/host_outputs", host_outputs),
        case("gather/refuses_what_is_not_there", refusals),
    ]
}

type Range = (SequenceId, u32, u32);

/// Axes, type and place of gathered rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Form {
    pub(crate) axes: Axes,
    pub(crate) dtype: DType,
    pub(crate) padding: Padding,
    pub(crate) place: Place,
}

/// Gathers ranges of K and V of a layer and compares them with the model.
pub(crate) fn check<B: Device>(
    fixture: &mut CacheFixture<B>,
    layer: usize,
    ranges: &[Range],
    form: Form,
) -> Result<(), CaseError> {
    let Form { axes, dtype, padding, place } = form;
    let lens: Vec<_> = ranges.iter().map(|range| range.2 as usize).collect();
    let capabilities = fixture.backend.capabilities().clone();
    for (index, plane) in [Plane::Key, Plane::Value].into_iter().enumerate() {
        let shape = fixture.layers()[layer].clone();
        let layout = TokenLayout::new(axes, &lens, [shape.heads, shape.dims[index]], padding);
        let (backend, queue) = (fixture.backend.clone(), fixture.cache.queue_mut());
        let mut out = Staged::output(&backend, queue, (layout, dtype), place)?;
        fixture.cache.gather(layer as u16, plane, ranges, out.view_mut(), axes)?;
        let tensor = out.read(&capabilities, fixture.cache.queue_mut())?;
        let rows = layout.unpack("gathered", tensor, &lens, 0.0)?;
        let width = shape.width(index);
        for ((id, begin, len), got) in ranges.iter().zip(rows) {
            let all = &fixture.model.layer(*id, layer)[index];
            let part = &all[*begin as usize * width..][..*len as usize * width];
            agree::check_read(&shape.stored[index], part, &got, dtype)
                .at(format!("{plane:?}, rows {begin}..+{len} of {id}, {form:?}"))?;
        }
    }
    Ok(())
}

fn forms<B: Device>(backend: &B) -> CaseResult {
    for order in ORDERS {
        for stored in KvFormat::PLAIN {
            let spec =
                small().head_dims(8, dim(backend, 6)).block_order(order).format(*stored).build()?;
            let mut fixture = CacheFixture::new(backend, spec, 1)?;
            fixture.fill(1, 9)?;
            fixture.fill(2, 1)?;
            fixture.fill(3, 4)?;
            let all: Vec<_> = [(1, 9), (2, 1), (3, 4)].map(|(id, n)| (seq(id), 0, n)).into();
            for axes in AXES {
                for dtype in DTYPES {
                    let place = Place::Device;
                    check(
                        &mut fixture,
                        0,
                        &all,
                        Form { axes, dtype, padding: Padding::default(), place },
                    )?;
                }
                for place in [Place::Host, Place::Device] {
                    let padding = Padding { batch: 2, tokens: 3, gap: 2 };
                    check(&mut fixture, 1, &all, Form { axes, dtype: DType::F32, padding, place })?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}

fn ranges<B: Device>(backend: &B) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().paged(3, 20).build()?, 2)?;
    fixture.fill(1, 10)?;
    fixture.fill(2, 5)?;
    let form =
        |axes| Form { axes, dtype: DType::F32, padding: Padding::default(), place: Place::Device };
    for axes in AXES {
        for begin in 0..10 {
            for len in [0, 1, 3, 10 - begin] {
                let len = len.min(10 - begin);
                check(&mut fixture, 0, &[(seq(1), begin, len)], form(axes))?;
                // The same sequence twice, with an empty range between.
                let list = [(seq(1), begin, len), (seq(2), 2, 0), (seq(2), 1, 3), (seq(1), 0, 2)];
                check(&mut fixture, 1, &list, form(axes))?;
            }
        }
        check(&mut fixture, 0, &[], form(axes))?;
    }
    Ok(Outcome::Holds)
}

/// Rows of the widths that devices have kernels of their own for, written and read back.
fn usual_head_dims<B: Device>(backend: &B) -> CaseResult {
    let stored = [KvFormat::F16, KvFormat::Int8(Scaling::Row), KvFormat::L4(ScaleGroup::Row)];
    for head_dim in [64, 128, 256] {
        for stored in stored {
            let spec = small().layers(1).head_dim(head_dim).format(stored).paged(4, 4).build()?;
            let mut fixture = CacheFixture::new(backend, spec, 5)?;
            fixture.fill(1, 9)?;
            let form = Form {
                axes: Axes::Thd,
                dtype: DType::Bf16,
                padding: Padding::default(),
                place: Place::Device,
            };
            check(&mut fixture, 0, &[(seq(1), 1, 7)], form)
                .at(format!("{stored}, head_dim {head_dim}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// Rows in host memory equal, to the bit, those that the same call writes to device memory.
fn host_outputs<B: Device>(backend: &B) -> CaseResult {
    let stored = [KvFormat::F32, KvFormat::Bf16, KvFormat::Fp8E4m3(Scaling::Row)];
    for stored in stored {
        let mut fixture = CacheFixture::new(backend, small().format(stored).build()?, 4)?;
        fixture.fill(1, 9)?;
        fixture.fill(2, 4)?;
        let ranges = [(seq(1), 2, 6), (seq(2), 0, 4)];
        for axes in AXES {
            for dtype in DTYPES {
                let mut read = |place| -> Result<_, CaseError> {
                    let padding = Padding { batch: 1, tokens: 1, gap: 2 };
                    let layout = TokenLayout::new(axes, &[6, 4], [2, 8], padding);
                    let (backend, queue) = (fixture.backend.clone(), fixture.cache.queue_mut());
                    let mut out = Staged::output(&backend, queue, (layout, dtype), place)?;
                    fixture.cache.gather(0, Plane::Value, &ranges, out.view_mut(), axes)?;
                    let queue = fixture.cache.queue_mut();
                    Ok(out.read(backend.capabilities(), queue)?.bytes().to_vec())
                };
                let [host, device] = [read(Place::Host)?, read(Place::Device)?];
                ensure(host == device, || {
                    format!("{stored} as {axes:?} {dtype}: {host:?}, on the device {device:?}")
                })?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn refusals<B: Device>(backend: &B) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 3)?;
    fixture.fill(1, 5)?;
    let before = fixture.state();
    let mut attempt = |layer: u16, range: Range, dims: [usize; 2]| {
        let layout = TokenLayout::new(Axes::Thd, &[64], dims, Padding::default());
        let (backend, queue) = (fixture.backend.clone(), fixture.cache.queue_mut());
        let mut out = Staged::output(&backend, queue, (layout, DType::F32), Place::Device)?;
        fixture.cache.gather(layer, Plane::Key, &[range], out.view_mut(), Axes::Thd)
    };
    let short = |e: &CacheError| matches!(e, CacheError::Plan(PlanError::SequenceTooShort { .. }));
    refused("one row too many", attempt(0, (seq(1), 0, 6), [2, 8]), short)?;
    refused("rows past the end", attempt(0, (seq(1), 5, 1), [2, 8]), short)?;
    refused("a huge range", attempt(0, (seq(1), u32::MAX, u32::MAX), [2, 8]), short)?;
    let unknown = |e: &CacheError| matches!(e, CacheError::Plan(PlanError::UnknownSequence { .. }));
    refused("an unknown sequence", attempt(0, (seq(2), 0, 1), [2, 8]), unknown)?;
    let layer = |e: &CacheError| matches!(e, CacheError::Plan(PlanError::UnknownLayer { .. }));
    refused("an unknown layer", attempt(2, (seq(1), 0, 1), [2, 8]), layer)?;
    let shape = |e: &CacheError| matches!(e, CacheError::Plan(PlanError::Shape { .. }));
    refused("other heads", attempt(0, (seq(1), 0, 1), [1, 8]), shape)?;
    refused("another dim", attempt(0, (seq(1), 0, 1), [2, 4]), shape)?;
    crate::fixture::unchanged(&mut fixture, &before, "refused gathers")?;
    Ok(Outcome::Holds)
}
