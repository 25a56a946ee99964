//! `te-convert/1`: ragged rows to a padded tensor and back.
use kv_core::backend::{AnyBackend, Backend, Queue};
use kv_core::plan::{ConvertArgs, ConvertPlan};
use kv_core::{Axes, DType};
use serde::Deserialize;

use crate::case::{At, CaseError, CaseResult, Outcome, ensure, same};
use crate::device::{Place, Staged};
use crate::fixture::AXES;
use crate::tokens::{Tensor, TokenLayout};

/// Lengths, extents and the padded tensor.
#[derive(Debug, Deserialize)]
pub(super) struct ConvertCase {
    cu_seqlens: Vec<u32>,
    b: usize,
    max_seq_len: usize,
    h: usize,
    d: usize,
    t_out: usize,
    bshd: Vec<f32>,
}

impl ConvertCase {
    /// Returns the layout of the same batch in other axes.
    fn layout(&self, axes: Axes) -> TokenLayout {
        let Self { b: batch, h: heads, d: dim, .. } = *self;
        let tokens = if axes == Axes::Thd { self.t_out } else { self.max_seq_len };
        TokenLayout { axes, batch, tokens, heads, dim, gap: 0 }
    }
}

/// Converts between every two axis orders, starting from the file's own tensor.
pub(super) fn run(backend: &AnyBackend, case: &ConvertCase) -> CaseResult {
    let plan = ConvertPlan::from_cu_seqlens(&case.cu_seqlens)?;
    let lens: Vec<_> = plan.entries().map(|(_, len)| len as usize).collect();
    let padded = [case.b, case.max_seq_len, case.h, case.d]
        .iter()
        .try_fold(1_usize, |n, x| n.checked_mul(*x));
    let rows = [case.b, case.h, case.d].iter().all(|n| (1..=1 << 12).contains(n));
    ensure(rows && padded == Some(case.bshd.len()), || {
        format!("bshd has {} values, not those of its extents", case.bshd.len())
    })?;
    ensure(
        lens.len() == case.b
            && lens.iter().all(|len| *len <= case.max_seq_len)
            && (plan.total() as usize..1 << 20).contains(&case.t_out),
        || "cu_seqlens do not fit b, max_seq_len and t_out".to_owned(),
    )?;
    let bshd = case.layout(Axes::Bshd);
    let rows = bshd.unpack("bshd", &Tensor::of(DType::F32, &case.bshd), &lens, 0.0)?;
    for (id, (values, len)) in (0_u64..).zip(rows.iter().zip(&lens)) {
        let expected = super::te::rows(id, 0..*len as u32, [0, 1], [case.h, case.d]);
        same(format!("bshd, sequence {id}"), values, &expected)?;
    }
    for from in AXES {
        for to in AXES {
            let (from, to) = (case.layout(from), case.layout(to));
            one(backend, &plan, &rows, [from, to]).at(format!("{} to {}", from.axes, to.axes))?;
        }
    }
    Ok(Outcome::Holds)
}

fn one(
    backend: &AnyBackend,
    plan: &ConvertPlan,
    rows: &[Vec<f32>],
    [from, to]: [TokenLayout; 2],
) -> Result<(), CaseError> {
    let mut queue = backend.queue()?;
    let source = (from, from.pack(DType::F32, rows, f32::NAN));
    let src = Staged::new(backend, &mut queue, source, Place::Device)?;
    let mut dst = Staged::output(backend, &mut queue, (to, DType::F32), Place::Device)?;
    let ends = ((src.view(), from.axes), (dst.view_mut(), to.axes));
    queue.convert(plan, ConvertArgs::new(plan, ends.0, ends.1)?)?;
    let got = dst.read(backend.capabilities(), &mut queue)?;
    same("values", got.values(), to.pack(DType::F32, rows, 0.0).values())
}
