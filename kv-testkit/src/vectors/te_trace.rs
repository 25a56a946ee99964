//! `te-trace/1`: behaviour of TransformerEngine, recorded step by step.
use std::collections::{BTreeMap, HashSet};

use kv_compat::InferenceParams;
use kv_core::Axes;
use kv_core::backend::AnyBackend;
use serde::Deserialize;

use super::te::{Config, Entry, Form, cached, hash, write};
use crate::case::{At, CaseError, CaseResult, Outcome, ensure, same};

/// A recorded run.
#[derive(Debug, Deserialize)]
pub(super) struct Trace {
    config: Config,
    formats: Vec<String>,
    #[serde(default)]
    reset_before: Vec<usize>,
    steps: Vec<Step>,
}

#[derive(Debug, Deserialize)]
struct Step {
    #[serde(rename = "step")]
    entries: Vec<(u64, u32)>,
    batch: Vec<u64>,
    len: Vec<u32>,
    pre: Vec<u32>,
    cu_q: Vec<u32>,
    cu_kv: Vec<u32>,
    pt: Option<Vec<Vec<u32>>>,
    #[serde(default)]
    alloc: Vec<(u64, u32)>,
    free: Option<u32>,
    h: Option<Vec<Vec<String>>>,
    ret: Option<BTreeMap<String, [[u32; 4]; 2]>>,
}

/// Runs a trace in every listed format, exact and padded.
pub(super) fn run(backend: &AnyBackend, trace: &Trace) -> CaseResult {
    ensure(!trace.formats.is_empty() && !trace.steps.is_empty(), || {
        "the trace lists no format or no step".to_owned()
    })?;
    for name in &trace.formats {
        let axes: Axes =
            name.parse().map_err(|error| CaseError::Broken(format!("formats: {error}")))?;
        for padded in [false, true] {
            let key = if padded { format!("{name}+pad") } else { name.clone() };
            let padded = if padded { Some(padding(trace)?) } else { None };
            let mut replay = Replay::new(backend, trace, Form { axes, padded }).at(&key)?;
            for (index, step) in trace.steps.iter().enumerate() {
                if trace.reset_before.contains(&index) {
                    replay.reset().at(format!("{key}, reset before step {index}"))?;
                }
                let place = || format!("{key}, step {index} {:?}", step.entries);
                replay.step(backend, step, &key).at(place())?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Returns batch entries and tokens of tensors padded for graph capture.
fn padding(trace: &Trace) -> Result<[usize; 2], CaseError> {
    let longest = trace.steps.iter().flat_map(|step| &step.entries).map(|(_, n)| *n).max();
    let tokens = trace.config.max_ctx_len.unwrap_or(0).max(longest.unwrap_or(0));
    let most = trace.config.max_sequence_length;
    ensure(tokens <= most.max(1), || {
        format!("a step or context of {tokens} tokens, sequences have at most {most}")
    })?;
    Ok([trace.config.max_batch_size as usize, tokens as usize])
}

struct Replay<'t> {
    /// The configuration as recorded; `config` has the `head_dim`s that the device supports.
    recorded: &'t Config,
    config: Config,
    form: Form,
    params: InferenceParams,
    /// Lengths by sequence, and this library's pages.
    lens: BTreeMap<u64, u32>,
    pages: BTreeMap<u64, Vec<u32>>,
    /// The recorded page table, and shapes, which steps omit while they do not change.
    table: Option<&'t Vec<Vec<u32>>>,
    shapes: Option<[[u32; 4]; 2]>,
}

impl<'t> Replay<'t> {
    fn new(backend: &AnyBackend, trace: &'t Trace, form: Form) -> Result<Self, CaseError> {
        let (recorded, config) = (&trace.config, trace.config.fitted(backend));
        let params = config.open(backend)?;
        let (lens, pages) = (BTreeMap::new(), BTreeMap::new());
        Ok(Self { recorded, config, form, params, lens, pages, table: None, shapes: None })
    }

    fn reset(&mut self) -> Result<(), CaseError> {
        self.params.reset()?;
        self.lens.clear();
        self.pages.clear();
        same("sequences", self.params.batch_size(), 0)
    }

    fn step(&mut self, backend: &AnyBackend, step: &'t Step, key: &str) -> Result<(), CaseError> {
        self.params.pre_step(&step.entries)?;
        let before = |id: &u64| self.lens.get(id).copied().unwrap_or(0);
        let entries: Vec<Entry> =
            step.entries.iter().map(|(id, n)| (*id, before(id), *n)).collect();
        self.check_arrays(step)?;
        if let Some(shapes) = step.ret.as_ref().and_then(|ret| ret.get(key)) {
            self.shapes = Some(self.fitted(*shapes));
        }
        for layer in 1..=self.config.layers() {
            let got = write(backend, &mut self.params, &self.config, (layer, &entries), self.form)
                .at(format!("layer {layer}"))?;
            if let Some(expected) = self.shapes {
                same(format!("ret of layer {layer}"), got, expected)?;
            }
        }
        if let Some(hashes) = &step.h {
            self.check_hashes(backend, step, hashes)?;
        }
        self.check_pages(step)?;
        self.lens = step.batch.iter().copied().zip(step.len.iter().copied()).collect();
        Ok(())
    }

    fn check_arrays(&self, step: &Step) -> Result<(), CaseError> {
        let rows = self.params.sequences();
        same("batch", rows.iter().map(|row| row.id.0).collect(), step.batch.clone())?;
        same("len", rows.iter().map(|row| row.len).collect(), step.len.clone())?;
        let pre: Vec<_> = step.pre.iter().copied().take(rows.len()).collect();
        same(
            "pre",
            self.params.get_seqlens_pre_step().iter().copied().take(rows.len()).collect(),
            pre,
        )?;
        same("cu_q", self.params.cu_seqlens_q(), &step.cu_q)?;
        same("cu_kv", self.params.cu_seqlens_kv(), &step.cu_kv)
    }

    /// Returns recorded shapes of K and V with the cache's own `head_dim`s.
    fn fitted(&self, shapes: [[u32; 4]; 2]) -> [[u32; 4]; 2] {
        let dims = [self.recorded, &self.config].map(Config::heads_dims);
        let mut shapes = shapes;
        for (shape, plane) in shapes.iter_mut().zip(0..) {
            let [recorded, own] = dims.map(|dims: [[usize; 2]; 2]| dims[plane][1] as u32);
            shape[3] = if shape[3] == recorded { own } else { shape[3] };
        }
        shapes
    }

    /// Returns the values of rows that were recorded.
    fn recorded_part(&self, plane: usize, rows: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let ([_, own], [_, recorded]) =
            (self.config.heads_dims()[plane], self.recorded.heads_dims()[plane]);
        let part = |row: &[f32]| row[..recorded].to_vec();
        rows.iter().map(|rows| rows.chunks(own).flat_map(part).collect()).collect()
    }

    fn check_hashes(
        &mut self,
        backend: &AnyBackend,
        step: &Step,
        hashes: &[Vec<String>],
    ) -> Result<(), CaseError> {
        same("rows of h", hashes.len(), step.batch.len())?;
        for layer in 1..=self.config.layers() {
            let [k, v] = cached(backend, &mut self.params, &self.config, layer)?;
            let [k, v] = [self.recorded_part(0, &k), self.recorded_part(1, &v)];
            for (row, id) in step.batch.iter().enumerate() {
                let expected = hashes[row].get(usize::from(layer) - 1).cloned().unwrap_or_default();
                let got = hash(&k[row], &v[row]);
                same(format!("h of sequence {id}, layer {layer}"), got, expected)?;
            }
        }
        Ok(())
    }

    /// Compares pages up to a renaming: the same number, in the same rows, each of one sequence,
    /// and unchanged later.
    fn check_pages(&mut self, step: &'t Step) -> Result<(), CaseError> {
        if let Some(table) = &step.pt {
            self.table = Some(table);
        }
        if let Some(free) = step.free {
            same("free", self.params.num_free_pages(), free)?;
        }
        let Some(size) = self.config.page_size.filter(|_| self.config.is_paged) else {
            return Ok(());
        };
        let width = self.params.page_table_width();
        let ours = self.params.page_table().chunks(width.max(1));
        let (mut seen, mut pages, mut grown) = (HashSet::new(), BTreeMap::new(), BTreeMap::new());
        for (row, (id, ours)) in step.batch.iter().zip(ours).enumerate() {
            let count = step.len[row].div_ceil(size) as usize;
            let place = format!("page table of sequence {id}");
            if let Some(table) = self.table {
                let theirs = table.get(row).map(Vec::as_slice).unwrap_or_default();
                same(format!("{place}, width"), ours.len(), theirs.len())?;
                let distinct: HashSet<_> = theirs.iter().take(count).collect();
                same(format!("{place}, recorded pages"), distinct.len(), count)?;
            }
            let (used, rest) = ours.split_at(count.min(ours.len()));
            same(format!("{place}, pages"), used.len(), count)?;
            ensure(used.iter().all(|page| seen.insert(*page)), || {
                format!("{place}: {used:?} holds a page of another row")
            })?;
            ensure(rest.iter().all(|page| *page == 0), || format!("{place}: {rest:?} is not 0"))?;
            let old = self.pages.get(id).cloned().unwrap_or_default();
            ensure(used.starts_with(&old), || format!("{place}: was {old:?}, is {used:?}"))?;
            if used.len() > old.len() {
                grown.insert(*id, used.len() - old.len());
            }
            pages.insert(*id, used.to_vec());
        }
        let mut alloc = BTreeMap::new();
        step.alloc.iter().for_each(|(id, _)| *alloc.entry(*id).or_insert(0) += 1);
        same("pages handed out by sequence", grown, alloc)?;
        self.pages = pages;
        Ok(())
    }
}
