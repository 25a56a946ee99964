//! `te-errors/1`: inputs that TransformerEngine refuses must be refused here with a typed error and
//! without a change.
use std::collections::BTreeMap;

use kv_compat::InferenceParams;
use kv_core::backend::AnyBackend;
use kv_core::{CacheError, DType, TensorView};
use serde::Deserialize;
use serde_json::Value;

use super::te::{Config, Entry, Form, State, check_content, state, write};
use crate::case::{At, CaseError, CaseResult, Outcome, ensure, refused, same};
use crate::device::dim;
use crate::tokens::Tensor;

/// One constructor call and the calls after it.
#[derive(Debug, Deserialize)]
pub(super) struct ErrorCase {
    ctor: Option<Config>,
    direct: Option<String>,
    #[serde(default)]
    actions: Vec<Action>,
    raises: Option<String>,
    result: Option<Value>,
    #[serde(default)]
    attrs: BTreeMap<String, Value>,
    ctor_kwargs_nonpaged: Option<Vec<String>>,
    ctor_kwargs_paged: Option<Vec<String>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Action {
    PreStep(Vec<(u64, u32)>),
    Step(StepAction),
}

#[derive(Debug, Clone, Deserialize)]
struct StepAction {
    layer: usize,
    qkv_format: String,
    dtype: String,
    shape: Vec<u32>,
}

/// A condition on a configuration, and the reason why this library differs.
type Difference = (fn(&Config) -> bool, &'static str);

/// Inputs that TransformerEngine refuses and this library accepts on purpose.
const WIDER: [Difference; 1] = [(
    |config| {
        let pages = config.page_size.and_then(|size| config.max_sequence_length.checked_div(size));
        let worst = pages.and_then(|pages| pages.checked_mul(config.max_batch_size));
        config.is_paged && config.total_num_pages.is_some_and(|n| n > 0 && Some(n) != worst)
    },
    "a pool smaller or larger than the worst case is the point of paging",
)];

/// Inputs that TransformerEngine accepts and this library refuses on purpose.
const STRICTER: [Difference; 2] = [
    (
        |config| config.max_ctx_len.is_some_and(|n| n == 0 || n > config.max_sequence_length),
        "a context length is in its documented range, in every format",
    ),
    (
        |config| {
            let name = config.qkv_format.as_deref().unwrap_or("bshd");
            !["bshd", "sbhd", "thd"].contains(&name)
        },
        "an axis order is one of the three, at the edge",
    ),
];

/// Runs one case.
pub(super) fn run(backend: &AnyBackend, case: &ErrorCase) -> CaseResult {
    if case.ctor_kwargs_nonpaged.is_some() || case.ctor_kwargs_paged.is_some() {
        return custom_manager(backend);
    }
    let config = match (&case.ctor, &case.direct) {
        (Some(config), _) => config.clone(),
        (None, Some(call)) => direct(call)?,
        (None, None) => {
            let why = "describes a class of TransformerEngine, not a behaviour of the cache";
            return Ok(Outcome::Unsupported(why.to_owned()));
        }
    };
    let published = config;
    let config = published.fitted(backend);
    let made = config.check_size().and_then(|()| config.ours());
    let made = made?;
    let opened = InferenceParams::new(backend.clone(), made);
    let stricter = STRICTER.iter().find(|(applies, _)| applies(&config));
    if let Some((_, why)) = stricter {
        refused(why, opened, typed)?;
        return Ok(Outcome::Holds);
    }
    if case.actions.is_empty() && case.raises.is_some() {
        let wider = WIDER.iter().find(|(applies, _)| applies(&config));
        let complete = config.num_heads_kv.is_some() && config.head_dim_k.is_some();
        let Some((_, why)) = wider.filter(|_| complete && divides(&config)) else {
            refused("the constructor", opened, typed)?;
            return Ok(Outcome::Holds);
        };
        works(backend, opened?, &config).at(why)?;
        return Ok(Outcome::Holds);
    }
    let mut params = opened?;
    check_attributes(backend, &params, &case.attrs)?;
    act(backend, &mut params, [&config, &published], case)?;
    if let Some(Value::Object(result)) = &case.result {
        check_result(&params, result)?;
    }
    Ok(Outcome::Holds)
}

fn divides(config: &Config) -> bool {
    let rest = config.page_size.and_then(|size| config.max_sequence_length.checked_rem(size));
    rest == Some(0) && config.max_batch_size > 0
}

/// Returns whether a refusal is one that callers can act on, found before the device was called.
fn typed(error: &CacheError) -> bool {
    matches!(error, CacheError::Spec(_) | CacheError::Plan(_) | CacheError::Exhausted(_))
}

/// Checks that a cache which TransformerEngine would not make takes a step and keeps its rows.
fn works(
    backend: &AnyBackend,
    mut params: InferenceParams,
    config: &Config,
) -> Result<(), CaseError> {
    for layer in 1..=usize::from(config.layers()) {
        params.allocate_memory(layer)?;
    }
    let form = Form { axes: kv_core::Axes::Thd, padded: None };
    for (before, new) in [(0, 1), (1, 1)].into_iter().take(config.max_sequence_length as usize) {
        params.pre_step(&[(5_u64, new)])?;
        let entries: [Entry; 1] = [(5, before, new)];
        for layer in 1..=config.layers() {
            write(backend, &mut params, config, (layer, &entries), form)?;
        }
        check_content(backend, &mut params, config)?;
    }
    Ok(())
}

/// Runs the actions; the last one fails if the case says so.
fn act(
    backend: &AnyBackend,
    params: &mut InferenceParams,
    [config, published]: [&Config; 2],
    case: &ErrorCase,
) -> Result<(), CaseError> {
    for layer in 1..=usize::from(config.layers()) {
        params.allocate_memory(layer)?;
    }
    let mut pending: Vec<Entry> = Vec::new();
    for (index, action) in case.actions.iter().enumerate() {
        let last = index + 1 == case.actions.len();
        let place = format!("action {index} {action:?}");
        let before = match action {
            Action::PreStep(step) => {
                // The previous step is written first, as every caller does.
                finish(backend, params, config, &pending).at(&place)?;
                let entry = |(id, n): &(u64, u32)| (*id, params.sequence_length(*id), *n);
                pending = step.iter().map(entry).collect();
                state(params)
            }
            Action::Step(_) => state(params),
        };
        let done = match action {
            Action::PreStep(step) => params.pre_step(step),
            Action::Step(step) => call_step(params, [config, published], step)?,
        };
        let empty = matches!(action, Action::PreStep(step) if step.is_empty());
        if last && case.raises.is_some() && !empty {
            refused(&place, done, typed)?;
            unchanged(params, &before).at(&place)?;
        } else {
            // An empty step ends every sequence, paged or not.
            done.at(&place)?;
            if empty {
                same("sequences after an empty step", params.batch_size(), 0)?;
            }
        }
    }
    Ok(())
}

fn unchanged(params: &InferenceParams, before: &State) -> Result<(), CaseError> {
    same("the state after a refusal", &state(params), before)
}

fn finish(
    backend: &AnyBackend,
    params: &mut InferenceParams,
    config: &Config,
    entries: &[Entry],
) -> Result<(), CaseError> {
    if entries.is_empty() {
        return Ok(());
    }
    let form = Form { axes: kv_core::Axes::Thd, padded: None };
    for layer in 1..=config.layers() {
        write(backend, params, config, (layer, entries), form)?;
    }
    Ok(())
}

/// Calls `step` with zeros of the case's shape and type.
fn call_step(
    params: &mut InferenceParams,
    [config, published]: [&Config; 2],
    step: &StepAction,
) -> Result<Result<(), CacheError>, CaseError> {
    let dtype: DType =
        step.dtype.parse().map_err(|error| CaseError::Broken(format!("step: {error}")))?;
    let mut shapes = [step.shape.clone(), step.shape.clone()];
    for (shape, [_, dim]) in shapes.iter_mut().zip(config.heads_dims()) {
        if let Some(last) = shape.last_mut().filter(|last| Some(**last) == published.head_dim_k) {
            *last = dim as u32;
        }
    }
    let size = |shape: &Vec<u32>| shape.iter().try_fold(1_u32, |n, x| n.checked_mul(*x));
    let sizes = [size(&shapes[0]), size(&shapes[1])].map(|size| size.filter(|n| *n < 1 << 26));
    let [Some(k), Some(v)] = sizes else {
        return Err(CaseError::Broken(format!("step: shape {:?} is out of bounds", step.shape)));
    };
    let [k, v] = [k, v].map(|len| Tensor::filled(dtype, len as usize, 0.0));
    let view = |tensor: &'_ Tensor, shape: &[u32]| (tensor.bytes().to_vec(), shape.to_vec());
    let (k, v) = (view(&k, &shapes[0]), view(&v, &shapes[1]));
    let k = TensorView::host_bytes(dtype, &k.0, &k.1);
    let v = TensorView::host_bytes(dtype, &v.0, &v.1);
    Ok(params.step(step.layer, k, v, &step.qkv_format).map(|_| ()))
}

fn check_attributes(
    backend: &AnyBackend,
    params: &InferenceParams,
    attrs: &BTreeMap<String, Value>,
) -> Result<(), CaseError> {
    for (name, expected) in attrs {
        let got = match name.as_str() {
            "input_qkv_format" => Value::from(params.input_qkv_format().to_string()),
            "output_qkv_format" => Value::from(params.output_qkv_format().name()),
            "cache_qkv_format" => Value::from(params.cache_qkv_format().to_string()),
            "head_dim_v" => {
                let wanted = expected.as_u64().and_then(|wanted| u32::try_from(wanted).ok());
                let fitted = wanted.map(|wanted| dim(backend, wanted));
                same(name, Some(params.config().head_dim_v), fitted)?;
                continue;
            }
            _ => continue,
        };
        same(name, &got, expected)?;
    }
    Ok(())
}

/// Checks the results of accessors; an unknown sequence has no pages, and the call must not create
/// it.
fn check_result(
    params: &InferenceParams,
    result: &serde_json::Map<String, Value>,
) -> Result<(), CaseError> {
    let before = state(params);
    let counts = |key: &str, count: fn(&Value) -> Option<u64>| -> Vec<(u64, u64)> {
        let list = result.get(key).and_then(Value::as_object).into_iter().flatten();
        list.filter_map(|(id, value)| Some((id.parse().ok()?, count(value)?))).collect()
    };
    let mut pages = counts("page_count", Value::as_u64);
    pages.extend(counts("page_list", |list| list.as_array().map(|list| list.len() as u64)));
    for (id, count) in pages {
        same(format!("pages of sequence {id}"), params.page_count(id) as u64, count)?;
    }
    if let Some(count) = result.get("sequence_count").and_then(Value::as_u64) {
        same("sequence_count", params.batch_size() as u64, count)?;
    }
    if let Some(lens) = result.get("sequence_lengths").and_then(Value::as_array) {
        let got: Vec<_> = params.sequences().iter().map(|row| Value::from(row.len)).collect();
        same("sequence_lengths", &got, lens)?;
    }
    if let Some(free) = result.get("has_free_page").and_then(Value::as_bool) {
        same("has_free_page", params.has_free_page(), free)?;
    }
    unchanged(params, &before)
}

/// Parses the arguments of `PagedKVCacheManager(name=number,...)`; heads and dims do not matter
/// there.
fn direct(call: &str) -> Result<Config, CaseError> {
    let not = || CaseError::Broken(format!("direct: {call:?} is no known call"));
    let (class, arguments) = call.split_once('(').ok_or_else(not)?;
    let arguments = arguments.strip_suffix(')').ok_or_else(not)?;
    let mut numbers = BTreeMap::new();
    for argument in arguments.split(',') {
        let (name, value) = argument.split_once('=').ok_or_else(not)?;
        numbers.insert(name.trim(), value.trim().parse::<u32>().map_err(|_| not())?);
    }
    let number = |name| numbers.get(name).copied();
    Ok(Config {
        max_batch_size: number("max_batch_size").ok_or_else(not)?,
        max_sequence_length: number("max_seqlen").ok_or_else(not)?,
        num_heads_kv: Some(number("num_heads").unwrap_or(1)),
        head_dim_k: Some(number("head_dim_k").unwrap_or(4)),
        head_dim_v: number("head_dim_v"),
        dtype: Some("f32".to_owned()),
        max_ctx_len: None,
        qkv_format: None,
        layers: None,
        is_paged: class.trim() == "PagedKVCacheManager",
        page_size: number("page_size"),
        total_num_pages: number("total_num_pages"),
    })
}

/// Checks that a custom manager gets the same arguments by name.
fn custom_manager(backend: &AnyBackend) -> CaseResult {
    for paged in [false, true] {
        let mut config =
            direct("NonPaged(max_batch_size=3,max_seqlen=8,num_heads=2,head_dim_k=4)")?;
        config.head_dim_v = Some(6);
        config = config.fitted(backend);
        if paged {
            (config.is_paged, config.page_size, config.total_num_pages) = (true, Some(4), Some(5));
        }
        let mut seen = None;
        let params =
            InferenceParams::with_manager(backend.clone(), config.ours()?, |device, made| {
                seen = Some(*made);
                made.build(device)
            })?;
        let seen = seen.ok_or("the factory was not called")?;
        let numbers = [seen.max_batch_size, seen.max_seqlen, seen.num_heads];
        same("max_batch_size, max_seqlen, num_heads", numbers, [3, 8, 2])?;
        same(
            "head dims",
            [seen.head_dim_k, seen.head_dim_v],
            [4, 6].map(|wanted| dim(backend, wanted)),
        )?;
        same("dtype", seen.dtype, DType::F32)?;
        let pages = seen.pages.map(|pages| (pages.total_num_pages, pages.page_size));
        same("pages", pages, paged.then_some((5, 4)))?;
        ensure(params.is_paged() == paged, || "is_paged".to_owned())?;
    }
    Ok(Outcome::Holds)
}
