//! Prefixes that are taken over: whose bytes they are, and that attention over them is right.
//!
//! K and V are made of the tokens before them, so a row of another prefix shows wherever it is
//! read.
use std::collections::BTreeMap;

use kv_core::{
    CacheSpec, CacheSpecBuilder, GroupId, KvCache, KvFormat, Plane, PrefixReuse, PublishAt,
    QkvFormat, ScaleGroup, StartOptions, Step, StepInput,
};

use super::{case, small};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, same};
use crate::device::{Device, Place, Staged};
use crate::lab::{dense, judge_layer, options, seq};
use crate::named::{self, Name};
use crate::oracle::Attention;
use crate::rng::Rng;

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("reuse/full_blocks_are_shared", full),
        case("reuse/a_part_of_a_block_is_copied", part),
        case("reuse/in_the_step_that_computes_it", early),
        case("reuse/forks_truncations_and_drafts", diverge),
        case("reuse/windows", windows),
        case("reuse/groups_of_other_block_sizes", groups),
        case("reuse/quantised_rows_are_the_same_bits", quantised),
        case("reuse/wiped_when_given_up", wiped),
        case("reuse/given_up_and_computed_again", evicted),
        case("reuse/salts_adapters_and_contents", apart),
    ]
}

/// Query heads of a kv head.
const GROUP: usize = 2;

/// A cache whose K and V are made of tokens.
struct Prompts<B: Device> {
    backend: B,
    cache: KvCache<B>,
    spec: CacheSpec,
    names: BTreeMap<u64, Vec<Name>>,
    rng: Rng,
}

/// Rows of queries and room for what attention makes of them, of one layer.
struct Asked<Buf> {
    q: Staged<Buf>,
    out: Staged<Buf>,
    rows: Vec<Vec<f32>>,
    oracle: Attention,
}

impl<B: Device> Prompts<B> {
    fn new(backend: &B, spec: CacheSpecBuilder) -> Result<Self, CaseError> {
        let spec = spec.build()?;
        let cache = KvCache::new(backend.clone(), spec.clone())?;
        let (backend, names, rng) = (backend.clone(), BTreeMap::new(), Rng::new(1));
        Ok(Self { backend, cache, spec, names, rng })
    }

    /// Starts a sequence, and computes what is not cached; tokens that were.
    fn begin(
        &mut self,
        id: u64,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<usize, CaseError> {
        let probed = self.cache.probe(prompt, options);
        let reused = self.cache.start(seq(id), prompt, options)?;
        same("start and probe", reused, probed)?;
        let all = named::names(prompt, &options);
        self.names.insert(id, all[..reused].to_vec());
        self.check(id).at(format!("{reused} tokens taken over"))?;
        self.run(&[(id, &prompt[reused..])], &all[reused..])?;
        Ok(reused)
    }

    /// Brings tokens to a plain sequence.
    fn feed(&mut self, id: u64, tokens: &[u32]) -> Result<(), CaseError> {
        let names = self.follow(id, tokens);
        self.run(&[(id, tokens)], &names)
    }

    fn follow(&self, id: u64, tokens: &[u32]) -> Vec<Name> {
        let root = named::root(&StartOptions::default());
        let mut name = self.names[&id].last().copied().unwrap_or(root);
        let next = |token: &u32| {
            name = named::then(name, *token, None);
            name
        };
        tokens.iter().map(next).collect()
    }

    /// One step whose attention is held to the oracle.
    fn run(&mut self, inputs: &[(u64, &[u32])], names: &[Name]) -> Result<(), CaseError> {
        let lens: Vec<_> = inputs.iter().map(|(_, tokens)| tokens.len()).collect();
        let mut asked = Vec::new();
        for layer in 0..self.spec.num_layers() {
            asked.push(self.ask(layer, &lens)?);
        }
        let list: Vec<_> = inputs.iter().map(|(id, t)| StepInput::tokens(seq(*id), t)).collect();
        let spec = self.spec.clone();
        let mut step = self.cache.begin_step(&list)?;
        attend(&mut step, &spec, names, &mut asked)?;
        step.commit()?;
        let mut rest = names;
        for ((id, _), len) in inputs.iter().zip(&lens) {
            let (own, others) = rest.split_at(*len);
            self.names.entry(*id).or_default().extend(own);
            rest = others;
        }
        let ids: Vec<_> = inputs.iter().map(|(id, _)| *id).collect();
        self.judge(&ids, &lens, asked)
    }

    fn ask(&mut self, layer: u16, lens: &[usize]) -> Result<Asked<B::Buffer>, CaseError> {
        let (group, _) = self.spec.locate(layer.into()).ok_or("a layer of no group")?;
        let group = &self.spec.groups()[usize::from(group.0)];
        let [k, v] = group.layouts();
        let (heads, dims) = (k.num_kv_heads() as usize, [k.head_dim(), v.head_dim()]);
        let [dk, dv] = dims.map(|dim| dim as usize);
        let window_left = group.window().map(|window| window.left);
        let oracle = Attention { window_left, ..Attention::causal(heads * GROUP, heads, dk, dv) };
        let q_heads = heads * GROUP;
        let rows: Vec<_> = lens.iter().map(|len| self.rng.normals(len * q_heads * dk)).collect();
        let layout = dense(QkvFormat::Thd, lens, [q_heads, dk]);
        let made = (layout, layout.pack(kv_core::DType::F32, &rows, 0.0));
        let queue = self.cache.queue_mut();
        let q = Staged::new(&self.backend, queue, made, Place::Host)?;
        let made = (dense(QkvFormat::Thd, lens, [q_heads, dv]), kv_core::DType::F32);
        let out = Staged::output(&self.backend, queue, made, Place::Device)?;
        Ok(Asked { q, out, rows, oracle })
    }

    fn judge(
        &mut self,
        ids: &[u64],
        lens: &[usize],
        asked: Vec<Asked<B::Buffer>>,
    ) -> Result<(), CaseError> {
        let capabilities = self.backend.capabilities().clone();
        for (mut asked, layer) in asked.into_iter().zip(0..) {
            let layout = asked.out.layout;
            let tensor = asked.out.read(&capabilities, self.cache.queue_mut())?;
            let out = layout.unpack("out", tensor, lens, 0.0)?;
            let Attention { kv_heads, dk, dv, .. } = asked.oracle;
            let rows = |id: &u64| {
                let names = &self.names[id];
                let k = named::rows(names, layer, Plane::Key, kv_heads * dk);
                [k, named::rows(names, layer, Plane::Value, kv_heads * dv)]
            };
            let cached: Vec<_> = ids.iter().map(rows).collect();
            let got = (out.as_slice(), None);
            judge_layer(&asked.oracle, &asked.rows, &cached, got, kv_core::DType::F32)
                .at(format!("layer {layer}"))?;
        }
        ids.iter().try_for_each(|id| self.check(*id))
    }

    /// Every row that a sequence still has is its own.
    fn check(&mut self, id: u64) -> Result<(), CaseError> {
        let names = self.names[&id].clone();
        for index in 0..self.spec.groups().len() {
            let group = GroupId(index as u8);
            let vacant = self.cache.vacant_entries(seq(id), group).unwrap_or_default();
            let map = *self.spec.groups()[index].slot_map();
            let begin = map.tokens(vacant.end).min(names.len() as u32);
            let seen = &names[begin as usize..];
            if !seen.is_empty() {
                let which = (seq(id), index);
                named::check(&self.backend, &mut self.cache, which, begin, seen)?;
            }
        }
        Ok(())
    }

    fn table(&self, id: u64) -> Vec<kv_core::BlockId> {
        self.cache.block_table(seq(id), GroupId(0)).unwrap_or_default().to_vec()
    }
}

/// Writes and attends every layer.
fn attend<B: Device>(
    step: &mut Step<'_, B>,
    spec: &CacheSpec,
    names: &[Name],
    asked: &mut [Asked<B::Buffer>],
) -> Result<(), CaseError> {
    named::write(step, spec, names)?;
    for (asked, layer) in asked.iter_mut().zip(0_u16..) {
        let options = options(&asked.oracle, QkvFormat::Thd);
        step.attend(layer, asked.q.view(), asked.out.view_mut(), &options)?;
    }
    Ok(())
}

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

fn with(mut tokens: Vec<u32>, more: &[u32]) -> Vec<u32> {
    tokens.extend(more);
    tokens
}

fn full<B: Device>(backend: &B) -> CaseResult {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let spec = small().prefix_reuse(PrefixReuse::FullBlocks).publish_at(publish_at);
        let mut prompts = Prompts::new(backend, spec)?;
        same("tokens of a new prompt", prompts.begin(1, &tokens(0..10), plain())?, 0)?;
        same("tokens", prompts.begin(2, &with(tokens(0..9), &[50, 51]), plain())?, 8)?;
        same("shared blocks", &prompts.table(1)[..2], &prompts.table(2)[..2])?;
        ensure(prompts.table(1)[2] != prompts.table(2)[2], || "the rest is shared".to_owned())?;
        prompts.feed(1, &[60, 61, 62])?;
        prompts.check(2)?;
        prompts.cache.release(seq(1))?;
        same("tokens of one that ended", prompts.begin(3, &tokens(0..10), plain())?, 8)?;
        prompts.check(2)?;
    }
    Ok(Outcome::Holds)
}

fn part<B: Device>(backend: &B) -> CaseResult {
    for ends in [false, true] {
        let mut prompts = Prompts::new(backend, small())?;
        prompts.begin(1, &tokens(0..8), plain())?;
        if ends {
            prompts.cache.release(seq(1))?;
        }
        same("tokens", prompts.begin(2, &with(tokens(0..6), &[90, 91]), plain())?, 6)?;
        same("tokens of the donor", prompts.cache.probe(&tokens(0..9), plain()), 8)?;
        if !ends {
            prompts.check(1).at("the donor")?;
        }
        prompts.feed(2, &[92, 93])?;
        prompts.begin(3, &tokens(0..9), plain())?;
    }
    Ok(Outcome::Holds)
}

fn early<B: Device>(backend: &B) -> CaseResult {
    let spec = small().prefix_reuse(PrefixReuse::FullBlocks).publish_at(PublishAt::Begin);
    let mut prompts = Prompts::new(backend, spec)?;
    let (first, second) = (tokens(0..11), with(tokens(0..9), &[70]));
    prompts.cache.start(seq(1), &first, plain())?;
    let mut asked = Vec::new();
    for layer in 0..prompts.spec.num_layers() {
        asked.push(prompts.ask(layer, &[11, 2])?);
    }
    let spec = prompts.spec.clone();
    let mut step = prompts.cache.begin_step(&[StepInput::tokens(seq(1), &first)])?;
    same("tokens of the same step", step.start(seq(2), &second, plain())?, 8)?;
    step.add(StepInput::tokens(seq(2), &second[8..]))?;
    let names = [named::names(&first, &plain()), named::names(&second, &plain())];
    let both = with_names(&names[0], &names[1][8..]);
    attend(&mut step, &spec, &both, &mut asked)?;
    step.commit()?;
    prompts.names = [1, 2].into_iter().zip(names).collect();
    prompts.judge(&[1, 2], &[11, 2], asked)?;
    same("shared blocks", &prompts.table(1)[..2], &prompts.table(2)[..2])?;
    Ok(Outcome::Holds)
}

fn with_names(a: &[Name], b: &[Name]) -> Vec<Name> {
    a.iter().chain(b).copied().collect()
}

fn diverge<B: Device>(backend: &B) -> CaseResult {
    let mut prompts = Prompts::new(backend, small())?;
    prompts.begin(1, &tokens(0..10), plain())?;
    prompts.cache.fork(seq(1), seq(2))?;
    let names = prompts.names[&1].clone();
    prompts.names.insert(2, names);
    prompts.feed(2, &[40, 41, 42])?;
    prompts.feed(1, &[30, 31])?;
    prompts.check(2)?;
    // Into a block that others may take, and on from there otherwise.
    prompts.cache.truncate(seq(1), 6)?;
    prompts.names.entry(1).and_modify(|names| names.truncate(6));
    prompts.feed(1, &[20, 21, 22])?;
    prompts.check(2)?;
    same(
        "tokens of the child",
        prompts.begin(3, &with(tokens(0..10), &[40, 41, 9]), plain())?,
        12,
    )?;
    // Drafts, of which one is right.
    let drafts = [60, 61, 62, 63, 64];
    let names = prompts.follow(3, &drafts);
    let spec = prompts.spec.clone();
    let mut step = prompts.cache.begin_step(&[StepInput::tokens(seq(3), &drafts).drafts(4)])?;
    named::write(&mut step, &spec, &names)?;
    step.commit_accepted(&[2])?;
    prompts.names.entry(3).and_modify(|all| all.extend(&names[..2]));
    prompts.check(3)?;
    prompts.feed(3, &[62, 70])?;
    let wrong = with(with(tokens(0..10), &[40, 41, 9]), &drafts);
    same("tokens that a draft guessed", prompts.cache.probe(&wrong, plain()), 16)?;
    Ok(Outcome::Holds)
}

fn windows<B: Device>(backend: &B) -> CaseResult {
    let spec = small().window_left(5).publish_at(PublishAt::Begin);
    let mut prompts = Prompts::new(backend, spec.prefix_reuse(PrefixReuse::FullBlocks))?;
    let prompt = tokens(0..20);
    prompts.cache.start(seq(1), &prompt, plain())?;
    prompts.names.insert(1, Vec::new());
    for chunk in prompt.chunks(4) {
        prompts.feed(1, chunk)?;
    }
    ensure(prompts.cache.free_blocks(GroupId(0)) > 11, || "nothing left the window".to_owned())?;
    let longer = with(prompt, &[50, 51]);
    same("tokens", prompts.begin(2, &longer, plain())?, 20)?;
    prompts.cache.release(seq(1))?;
    prompts.feed(2, &[52, 53, 54])?;
    same("tokens behind a part", prompts.begin(3, &with(tokens(0..9), &[7]), plain())?, 8)?;
    Ok(Outcome::Holds)
}

fn groups<B: Device>(backend: &B) -> CaseResult {
    for reuse in [PrefixReuse::FullBlocks, PrefixReuse::Partial] {
        let spec = small().layers(3).prefix_reuse(reuse);
        let spec = spec.group([1], |group| group.paged(6, 12));
        let spec = spec.group([2], |group| group.paged(2, 40).window_left(7));
        let mut prompts = Prompts::new(backend, spec)?;
        prompts.begin(1, &tokens(0..27), plain())?;
        let got = prompts.begin(2, &with(tokens(0..20), &[80, 81]), plain())?;
        ensure(got >= 12, || format!("{got} tokens where 12 are a boundary of all groups"))?;
        prompts.feed(2, &[82, 83, 84])?;
        prompts.feed(1, &[85])?;
        prompts.check(2)?;
    }
    Ok(Outcome::Holds)
}

/// The rows of the first `len` tokens, as bits.
fn bits<B: Device>(
    prompts: &mut Prompts<B>,
    id: u64,
    len: usize,
) -> Result<Vec<Vec<u32>>, CaseError> {
    let mut all = Vec::new();
    for layer in 0..prompts.spec.num_layers() {
        for plane in [Plane::Key, Plane::Value] {
            let made = (dense(QkvFormat::Thd, &[len], [2, 32]), kv_core::DType::F32);
            let queue = prompts.cache.queue_mut();
            let mut out = Staged::output(&prompts.backend, queue, made, Place::Device)?;
            let range = [(seq(id), 0, len as u32)];
            prompts.cache.gather(layer, plane, &range, out.view_mut(), QkvFormat::Thd)?;
            let capabilities = prompts.backend.capabilities().clone();
            let rows = out.read(&capabilities, prompts.cache.queue_mut())?.values();
            all.push(rows.into_iter().map(f32::to_bits).collect());
        }
    }
    Ok(all)
}

fn quantised<B: Device>(backend: &B) -> CaseResult {
    let formats = [KvFormat::F16, KvFormat::Q8_0, KvFormat::L4(ScaleGroup::Row)];
    for format in formats {
        for (sinks, tail) in [(0, false), (3, false), (2, true)] {
            if tail && !format.is_quantised() {
                continue;
            }
            let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(32).format(format);
            let spec = spec.transform(kv_core::Transform::Off).sinks(sinks).tail(tail);
            let mut prompts = Prompts::new(backend, spec.paged(8, 24))?;
            let place = format!("{format}, {sinks} sinks, tail: {tail}");
            let spec = prompts.spec.clone();
            let prompt = tokens(0..30);
            let mut first = Vec::new();
            for (id, prompt) in [(1, prompt.clone()), (2, with(tokens(0..26), &[70, 71]))] {
                let reused = prompts.cache.start(seq(id), &prompt, plain())?;
                ensure((reused > 8) == (id == 2), || format!("{place}: {reused} tokens"))?;
                if id == 2 {
                    let got = bits(&mut prompts, 2, reused).at(&place)?;
                    let row = |bits: &Vec<u32>| bits[..reused * 64].to_vec();
                    let expected: Vec<_> = first.iter().map(row).collect();
                    ensure(got == expected, || format!("{place}: other bits"))?;
                }
                let names = named::names(&prompt, &plain());
                let input = StepInput::tokens(seq(id), &prompt[reused..]);
                let mut step = prompts.cache.begin_step(&[input]).at(&place)?;
                named::write(&mut step, &spec, &names[reused..])?;
                step.commit()?;
                if id == 1 {
                    first = bits(&mut prompts, 1, 30)?;
                }
            }
            ensure(bits(&mut prompts, 1, 30)? == first, || format!("{place}: the donor changed"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn wiped<B: Device>(backend: &B) -> CaseResult {
    let mut prompts = Prompts::new(backend, small().paged(4, 5).wipe_on_release(true))?;
    let stale = |prompts: &mut Prompts<B>| -> Result<usize, CaseError> {
        let all = super::life::bytes(&mut prompts.cache, GroupId(0))?;
        Ok(all.iter().flatten().filter(|byte| **byte != 0).count())
    };
    prompts.begin(1, &tokens(0..16), plain())?;
    prompts.cache.release(seq(1))?;
    ensure(stale(&mut prompts)? > 0, || "what is cached was wiped".to_owned())?;
    let row = 2 * 2 * 8 * 2 * 4;
    prompts.begin(2, &[90], plain())?;
    prompts.begin(3, &[91], plain())?;
    prompts.begin(4, &[92], plain())?;
    let left = stale(&mut prompts)?;
    // Two of the four cached blocks were given up; each holds one row now.
    ensure(left <= 8 * row + 3 * row, || format!("{left} bytes hold something"))?;
    for id in 2..5 {
        prompts.cache.release(seq(id))?;
    }
    ensure(prompts.cache.reset_prefixes()?, || "a reset was refused".to_owned())?;
    same("bytes left by a reset", stale(&mut prompts)?, 0)?;
    Ok(Outcome::Holds)
}

fn evicted<B: Device>(backend: &B) -> CaseResult {
    let mut prompts = Prompts::new(backend, small().paged(4, 6))?;
    for round in 0..3 {
        for other in [0, 100, 200] {
            prompts.begin(1, &tokens(other..other + 18), plain()).at(format!("round {round}"))?;
            prompts.feed(1, &[7, 8])?;
            prompts.cache.release(seq(1))?;
        }
    }
    ensure(prompts.cache.stats().evictions > 0, || "nothing was given up".to_owned())?;
    Ok(Outcome::Holds)
}

fn apart<B: Device>(backend: &B) -> CaseResult {
    let mut prompts = Prompts::new(backend, small().paged(4, 64))?;
    let span = |id| [kv_core::reuse::ContentSpan { begin: 5, len: 2, id }];
    let (cat, dog) = (span(1), span(2));
    let all = [
        (plain(), 0),
        (plain().salt(b"t1"), 0),
        (plain().salt(b"t2"), 0),
        (plain().adapter(1), 0),
        (plain().salt(b"t1").adapter(1), 0),
        (plain().contents(&cat), 4),
        (plain().contents(&dog), 4),
    ];
    for ((options, expected), id) in all.iter().zip(0..) {
        let got = prompts.begin(id, &tokens(0..14), *options)?;
        same(format!("tokens of others with {options:?}"), got, *expected)?;
    }
    for ((options, _), id) in all.iter().zip(100..) {
        let got = prompts.begin(id, &tokens(0..14), *options)?;
        ensure(got >= 12, || format!("{got} tokens of its own with {options:?}"))?;
    }
    Ok(Outcome::Holds)
}
