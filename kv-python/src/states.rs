//! `States`: the settings of recurrent states of some layers.
use kv::DType;
use kv::spec::{CacheSpecBuilder, StateFormat, StatesBuilder};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Element types of parts, by the names that numpy and torch have for them.
const TYPES: [(&str, DType); 3] =
    [("float32", DType::F32), ("float16", DType::F16), ("bfloat16", DType::Bf16)];

/// Forms of snapshots, by name.
const FORMATS: [(&str, StateFormat); 3] =
    [("f16", StateFormat::F16), ("same", StateFormat::Same), ("int8", StateFormat::Int8)];

/// Recurrent states of some layers, for `Cache(states=[..])`.
///
/// A state is the result of all tokens before it: the window of a convolution, the matrix of a
/// linear attention. `parts` are its tensors, `(shape, type)` with up to three axes and
/// `"float32"`, `"float16"` or `"bfloat16"`. The layers have no keys and values unless
/// `attention` is set or `windows` of the cache has them.
///
/// `slots` are running states: one for each sequence with tokens, and one for each entry of a step,
/// with one more for each draft up to `drafts`. `snapshots` are copies behind prompts, from which
/// other prompts go on; none unless set, and then no prompt is reused. `snapshot_format` is
/// `"f16"`, which halves float32, `"int8"`, which leaves about a quarter of it, or `"same"`.
/// `per_path` bounds the snapshots along one text. `grid` takes them behind multiples of that many
/// tokens alone.
#[pyclass(frozen, module = "kvblock")]
#[derive(Debug)]
pub(crate) struct States {
    #[pyo3(get)]
    layers: Vec<u16>,
    shapes: Vec<(Vec<u32>, DType)>,
    #[pyo3(get)]
    slots: u32,
    #[pyo3(get)]
    snapshots: u32,
    format: StateFormat,
    #[pyo3(get)]
    per_path: Option<u32>,
    #[pyo3(get)]
    drafts: u32,
    #[pyo3(get)]
    grid: u32,
    #[pyo3(get)]
    attention: bool,
}

/// Finds the value of a name.
///
/// # Errors
/// A `ValueError` with the names of the table.
fn named<T: Copy>(table: &[(&str, T)], argument: &str, given: &str) -> PyResult<T> {
    let found = table.iter().find(|(name, _)| *name == given);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = table.iter().map(|(name, _)| format!("{name:?}")).collect();
        let names = names.join(" or ");
        PyValueError::new_err(format!("{argument}={given:?}: {names} is expected"))
    })
}

/// Returns the name of a value.
fn name_of<T: PartialEq>(table: &[(&'static str, T)], value: &T) -> &'static str {
    table.iter().find(|(_, of)| of == value).map_or("unknown", |(name, _)| *name)
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "Python names them")]
impl States {
    #[new]
    #[pyo3(signature = (
        *, layers, parts, slots, snapshots = 0, snapshot_format = "f16", per_path = None,
        drafts = 0, grid = 1, attention = false
    ))]
    fn new(
        layers: Vec<u16>,
        parts: Vec<(Vec<u32>, String)>,
        slots: u32,
        snapshots: u32,
        snapshot_format: &str,
        per_path: Option<u32>,
        drafts: u32,
        grid: u32,
        attention: bool,
    ) -> PyResult<Self> {
        let typed =
            |(shape, given): (_, String)| Ok((shape, named(&TYPES, "type of a part", &given)?));
        let shapes = parts.into_iter().map(typed).collect::<PyResult<_>>()?;
        let format = named(&FORMATS, "snapshot_format", snapshot_format)?;
        if grid == 0 {
            return Err(PyValueError::new_err("grid=0: at least 1 is expected"));
        }
        Ok(Self { layers, shapes, slots, snapshots, format, per_path, drafts, grid, attention })
    }

    /// The tensors of a layer's state, `(shape, type)`.
    #[getter]
    fn parts(&self) -> Vec<(Vec<u32>, &'static str)> {
        self.shapes.iter().map(|(shape, of)| (shape.clone(), name_of(&TYPES, of))).collect()
    }

    /// The form of snapshots.
    #[getter]
    fn snapshot_format(&self) -> &'static str {
        name_of(&FORMATS, &self.format)
    }

    fn __repr__(&self) -> String {
        format!(
            "States(layers={:?}, parts={:?}, slots={}, snapshots={})",
            self.layers,
            self.parts(),
            self.slots,
            self.snapshots,
        )
    }
}

/// The settings of [`States`], without the interpreter.
#[derive(Debug, Clone)]
pub(crate) struct StateLayers {
    pub(crate) layers: Vec<u16>,
    /// Whether the layers have keys and values too.
    pub(crate) attend: bool,
    builder: StatesBuilder,
}

impl StateLayers {
    /// Reads the settings.
    pub(crate) fn of(states: &States) -> Self {
        let mut builder = StatesBuilder::default().slots(states.slots).drafts(states.drafts);
        for (shape, dtype) in &states.shapes {
            builder = builder.part(shape, *dtype);
        }
        builder = builder.snapshots(states.snapshots, states.format).grid(states.grid);
        if let Some(most) = states.per_path {
            builder = builder.snapshots_per_path(most);
        }
        Self { layers: states.layers.clone(), attend: states.attention, builder }
    }

    /// Gives the states to a cache.
    pub(crate) fn apply(&self, builder: CacheSpecBuilder) -> CacheSpecBuilder {
        builder.states(self.layers.iter().copied(), |_| self.builder.clone())
    }
}
