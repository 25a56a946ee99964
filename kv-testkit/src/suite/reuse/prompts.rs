//! A cache whose K and V are derived from tokens, and whose attention is checked against the
//! oracle.
use std::collections::BTreeMap;

use kv_core::backend::{AnyBackend, AnyBuffer, Backend, Plane};
use kv_core::spec::CacheSpecBuilder;
use kv_core::{Axes, CacheSpec, GroupId, KvCache, StartOptions, Step, StepInput};

use crate::case::{At, CaseError, same};
use crate::device::{Place, Staged};
use crate::fixture::{check_attention, dense, options, seq};
use crate::oracle::Attention;
use crate::provenance::{self, PrefixHash};
use crate::rng::Rng;

/// Query heads per kv head.
const GROUP: usize = 2;

/// A cache whose K and V are derived from tokens.
pub(super) struct Prompts {
    pub(super) backend: AnyBackend,
    pub(super) cache: KvCache,
    pub(super) spec: CacheSpec,
    pub(super) hashes: BTreeMap<u64, Vec<PrefixHash>>,
    rng: Rng,
}

/// Queries and outputs of one layer.
pub(super) struct PendingAttention<Buf> {
    q: Staged<Buf>,
    out: Staged<Buf>,
    rows: Vec<Vec<f32>>,
    oracle: Attention,
}

impl Prompts {
    pub(super) fn new(backend: &AnyBackend, spec: CacheSpecBuilder) -> Result<Self, CaseError> {
        let spec = spec.build()?;
        let cache = KvCache::new(backend.clone(), spec.clone())?;
        let (backend, hashes, rng) = (backend.clone(), BTreeMap::new(), Rng::new(1));
        Ok(Self { backend, cache, spec, hashes, rng })
    }

    /// Starts a sequence and computes the tokens that are not cached; returns the number of reused
    /// ones.
    pub(super) fn begin(
        &mut self,
        id: u64,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<u32, CaseError> {
        let probed = self.cache.state().probe(prompt, options);
        let reused = self.cache.start(seq(id), prompt, options)?;
        same("start and probe", reused, probed)?;
        let all = provenance::prefix_hashes(prompt, &options);
        self.hashes.insert(id, all[..reused as usize].to_vec());
        self.check(id).at(format!("{reused} reused tokens"))?;
        self.run(&[(id, &prompt[reused as usize..])], &all[reused as usize..])?;
        Ok(reused)
    }

    /// Appends tokens to a sequence that was started with default options.
    pub(super) fn append(&mut self, id: u64, tokens: &[u32]) -> Result<(), CaseError> {
        let hashes = self.hashes_after(id, tokens);
        self.run(&[(id, tokens)], &hashes)
    }

    pub(super) fn hashes_after(&self, id: u64, tokens: &[u32]) -> Vec<PrefixHash> {
        let root = provenance::root(&StartOptions::default());
        let mut name = self.hashes[&id].last().copied().unwrap_or(root);
        let next = |token: &u32| {
            name = provenance::extend(name, *token, None);
            name
        };
        tokens.iter().map(next).collect()
    }

    /// Runs one step and checks its attention against the oracle.
    pub(super) fn run(
        &mut self,
        inputs: &[(u64, &[u32])],
        hashes: &[PrefixHash],
    ) -> Result<(), CaseError> {
        let lens: Vec<_> = inputs.iter().map(|(_, tokens)| tokens.len()).collect();
        let mut pending = Vec::new();
        for layer in 0..self.spec.num_layers() {
            pending.push(self.stage(layer, &lens)?);
        }
        let list: Vec<_> = inputs.iter().map(|(id, t)| StepInput::tokens(seq(*id), t)).collect();
        let spec = self.spec.clone();
        let mut step = self.cache.begin_step(&list)?;
        attend(&mut step, &spec, hashes, &mut pending)?;
        step.commit()?;
        let mut rest = hashes;
        for ((id, _), len) in inputs.iter().zip(&lens) {
            let (own, others) = rest.split_at(*len);
            self.hashes.entry(*id).or_default().extend(own);
            rest = others;
        }
        let ids: Vec<_> = inputs.iter().map(|(id, _)| *id).collect();
        self.check_attention(&ids, &lens, pending)
    }

    pub(super) fn stage(
        &mut self,
        layer: u16,
        lens: &[usize],
    ) -> Result<PendingAttention<AnyBuffer>, CaseError> {
        let (group, _) = self.spec.locate(layer.into()).ok_or("a layer of no group")?;
        let group = &self.spec.groups()[usize::from(group.0)];
        let [k, v] = group.layouts();
        let (heads, dims) = (k.num_kv_heads() as usize, [k.head_dim(), v.head_dim()]);
        let [dk, dv] = dims.map(|dim| dim as usize);
        let window_left = group.window().map(|window| window.left);
        let oracle = Attention { window_left, ..Attention::causal(heads * GROUP, heads, dk, dv) };
        let q_heads = heads * GROUP;
        let rows: Vec<_> = lens.iter().map(|len| self.rng.normals(len * q_heads * dk)).collect();
        let layout = dense(Axes::Thd, lens, [q_heads, dk]);
        let made = (layout, layout.pack(kv_core::DType::F32, &rows, 0.0));
        let queue = self.cache.queue_mut();
        let q = Staged::new(&self.backend, queue, made, Place::Host)?;
        let made = (dense(Axes::Thd, lens, [q_heads, dv]), kv_core::DType::F32);
        let out = Staged::output(&self.backend, queue, made, Place::Device)?;
        Ok(PendingAttention { q, out, rows, oracle })
    }

    pub(super) fn check_attention(
        &mut self,
        ids: &[u64],
        lens: &[usize],
        pending: Vec<PendingAttention<AnyBuffer>>,
    ) -> Result<(), CaseError> {
        let capabilities = self.backend.capabilities().clone();
        for (mut pending, layer) in pending.into_iter().zip(0..) {
            let layout = pending.out.layout;
            let tensor = pending.out.read(&capabilities, self.cache.queue_mut())?;
            let out = layout.unpack("out", tensor, lens, 0.0)?;
            let Attention { kv_heads, dk, dv, .. } = pending.oracle;
            let rows = |id: &u64| {
                let hashes = &self.hashes[id];
                let k = provenance::rows(hashes, layer, Plane::Key, kv_heads * dk);
                [k, provenance::rows(hashes, layer, Plane::Value, kv_heads * dv)]
            };
            let cached: Vec<_> = ids.iter().map(rows).collect();
            let got = (out.as_slice(), None);
            check_attention(&pending.oracle, &pending.rows, &cached, got, kv_core::DType::F32)
                .at(format!("layer {layer}"))?;
        }
        ids.iter().try_for_each(|id| self.check(*id))
    }

    /// Checks that every row that a sequence still has is its own.
    pub(super) fn check(&mut self, id: u64) -> Result<(), CaseError> {
        let hashes = self.hashes[&id].clone();
        for index in 0..self.spec.groups().len() {
            let group = GroupId(index as u8);
            let vacant = self.cache.state().vacant_entries(seq(id), group).unwrap_or_default();
            let map = *self.spec.groups()[index].slot_map();
            let begin = map.tokens(vacant.end).min(hashes.len() as u32);
            let seen = &hashes[begin as usize..];
            if !seen.is_empty() {
                let which = (seq(id), index);
                provenance::check(&self.backend, &mut self.cache, which, begin, seen)?;
            }
        }
        Ok(())
    }

    pub(super) fn table(&self, id: u64) -> Vec<kv_core::BlockId> {
        self.cache.state().block_table(seq(id), GroupId(0)).unwrap_or_default().to_vec()
    }
}

/// Writes and attends every layer.
pub(super) fn attend(
    step: &mut Step<'_>,
    spec: &CacheSpec,
    hashes: &[PrefixHash],
    pending: &mut [PendingAttention<AnyBuffer>],
) -> Result<(), CaseError> {
    provenance::write(step, spec, hashes)?;
    for (pending, layer) in pending.iter_mut().zip(0_u16..) {
        let options = options(&pending.oracle, Axes::Thd);
        step.attend(layer, pending.q.view(), pending.out.view_mut(), &options)?;
    }
    Ok(())
}
