//! Device memory of one group: planes, cut into segments.
use std::any::Any;
use std::fmt;

use crate::backend::{AnyBuffer, Backend, Queue};
use crate::calibration::PlaneConstants;
use crate::error::{DeviceError, DeviceErrorKind, PlanError};
use crate::geometry::PlaneLayout;
use crate::num::{to_u64, to_usize};

/// Which half of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "there are exactly two")]
pub enum Plane {
    /// Keys.
    Key,
    /// Values.
    Value,
}

impl fmt::Display for Plane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "K",
            Self::Value => "V",
        })
    }
}

/// Memory of the layers of one group. A layer's memory is allocated once and never grows.
#[derive(Debug)]
pub struct KvStorage<Buf> {
    layouts: [PlaneLayout; 2],
    layers: Vec<Option<[PlaneBuffers<Buf>; 2]>>,
}

/// The buffers of one plane.
#[derive(Debug)]
struct PlaneBuffers<Buf> {
    segments: Vec<Buf>,
    constants: Option<Buf>,
}

impl<Buf> PlaneBuffers<Buf> {
    fn view(&self, layout: PlaneLayout) -> PlaneView<'_, Buf> {
        PlaneView {
            layout,
            segments: Handles::Direct(&self.segments),
            constants: Handles::Direct(self.constants.as_slice()),
        }
    }
}

impl<Buf> KvStorage<Buf> {
    /// Cuts the planes for a device; no layer has memory yet.
    ///
    /// # Errors
    /// [`DeviceErrorKind::Unsupported`] when a single block exceeds what the device can bind.
    pub fn new<B: Backend<Buffer = Buf>>(
        backend: &B,
        layouts: [PlaneLayout; 2],
    ) -> Result<Self, DeviceError> {
        let capabilities = backend.capabilities();
        let max = capabilities.buffer_bytes_max.min(capabilities.binding_bytes_max);
        // K and V are cut alike, so that one block lies in the same segment of both.
        let block = layouts.iter().map(PlaneLayout::block_bytes).max().unwrap_or(1);
        let blocks = max.checked_div(block).unwrap_or(0);
        if blocks == 0 {
            return Err(DeviceError::new(DeviceErrorKind::Unsupported, "allocate planes")
                .with_detail(format!("a block of {block} bytes, the device binds {max}")));
        }
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let layouts = layouts.map(|layout| layout.with_segments_of(blocks));
        Ok(Self { layouts, layers: Vec::new() })
    }

    /// Allocates layer `index` of the group, zeroed; `false` when it has memory already. The
    /// constants of planes that have some stay zero: see [`Self::allocate_with`].
    ///
    /// # Errors
    /// As [`Backend::alloc`]; then nothing is kept.
    pub fn allocate<B: Backend<Buffer = Buf>>(
        &mut self,
        backend: &B,
        index: usize,
    ) -> Result<bool, DeviceError> {
        if self.is_allocated(index) {
            return Ok(false);
        }
        let planes = self.planes(backend)?;
        self.put(index, planes);
        Ok(true)
    }

    /// As [`Self::allocate`], and uploads the constants of K and V; those a plane has no use for
    /// are ignored.
    ///
    /// # Errors
    /// As [`Backend::alloc`] and [`Queue::upload`], [`DeviceErrorKind::OutOfRange`] for constants
    /// of another shape; then nothing is kept.
    pub fn allocate_with<B: Backend<Buffer = Buf>>(
        &mut self,
        (backend, queue): (&B, &mut B::Queue),
        index: usize,
        constants: [Option<&PlaneConstants>; 2],
    ) -> Result<bool, DeviceError> {
        if self.is_allocated(index) {
            return Ok(false);
        }
        let planes = self.planes(backend)?;
        for ((plane, layout), constants) in planes.iter().zip(&self.layouts).zip(constants) {
            let Some((buffer, constants)) = plane.constants.as_ref().zip(constants) else {
                continue;
            };
            let bytes: &[u8] = bytemuck::cast_slice(constants.values());
            if to_u64(bytes.len()) != constants_bytes(layout) {
                return Err(DeviceError::new(DeviceErrorKind::OutOfRange, "upload constants"));
            }
            queue.upload(buffer, 0, bytes)?;
        }
        self.put(index, planes);
        Ok(true)
    }

    fn planes<B: Backend<Buffer = Buf>>(
        &self,
        backend: &B,
    ) -> Result<[PlaneBuffers<Buf>; 2], DeviceError> {
        let plane = |layout: &PlaneLayout| {
            let segments = (0..layout.num_segments())
                .map(|segment| backend.alloc(layout.segment_bytes(segment)))
                .collect::<Result<Vec<_>, _>>()?;
            let constants = layout
                .has_constants()
                .then(|| backend.alloc(constants_bytes(layout)))
                .transpose()?;
            Ok(PlaneBuffers { segments, constants })
        };
        let [k, v] = &self.layouts;
        Ok([plane(k)?, plane(v)?])
    }

    fn put(&mut self, index: usize, planes: [PlaneBuffers<Buf>; 2]) {
        if self.layers.len() <= index {
            self.layers.resize_with(index.saturating_add(1), || None);
        }
        if let Some(layer) = self.layers.get_mut(index) {
            *layer = Some(planes);
        }
    }

    /// Whether layer `index` of the group has memory.
    pub fn is_allocated(&self, index: usize) -> bool {
        self.layers.get(index).is_some_and(Option::is_some)
    }
    /// Layers that have memory.
    pub fn num_allocated(&self) -> usize {
        self.layers.iter().flatten().count()
    }
    /// Layouts of the K and the V plane.
    pub fn layouts(&self) -> &[PlaneLayout; 2] {
        &self.layouts
    }
    /// One plane of layer `index`, `None` while it has no memory.
    pub fn plane(&self, index: usize, plane: Plane) -> Option<PlaneView<'_, Buf>> {
        let [k, v] = self.layers.get(index)?.as_ref()?;
        let [k_layout, v_layout] = self.layouts;
        Some(match plane {
            Plane::Key => k.view(k_layout),
            Plane::Value => v.view(v_layout),
        })
    }
    /// All planes, for operations over every layer at once.
    pub fn view(&self) -> StorageView<'_, Buf> {
        StorageView(StorageSource::Direct(self))
    }
}

/// Bytes of the constants of one plane.
fn constants_bytes(layout: &PlaneLayout) -> u64 {
    let heads = to_usize(layout.num_kv_heads());
    let values = PlaneConstants::len_of(heads, to_usize(layout.head_dim()));
    to_u64(values).saturating_mul(to_u64(size_of::<f32>()))
}

/// One plane: where every row lies, and the buffers that hold it.
#[derive(Debug)]
pub struct PlaneView<'a, Buf> {
    layout: PlaneLayout,
    segments: Handles<'a, Buf>,
    /// None or one.
    constants: Handles<'a, Buf>,
}

/// Buffers of a plane. They may be stored erased, and are then cast one by one on the way out,
/// which needs no list of its own.
#[derive(Debug)]
enum Handles<'a, Buf> {
    Direct(&'a [Buf]),
    Erased(&'a [AnyBuffer], Erasures),
}

/// How often a buffer was erased: more than once where a backend wraps an erased one.
#[derive(Debug, Clone, Copy)]
struct Erasures(u8);

impl Erasures {
    const ONE: Self = Self(1);

    fn one_more(self) -> Self {
        Self(self.0.saturating_add(1))
    }
    fn undo<T: Any>(self, buffer: &AnyBuffer) -> Option<&T> {
        let mut inner = buffer;
        for _ in 1..self.0 {
            inner = inner.downcast_ref()?;
        }
        inner.downcast_ref()
    }
}

impl<Buf> Clone for PlaneView<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for PlaneView<'_, Buf> {}
impl<Buf> Clone for Handles<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for Handles<'_, Buf> {}

impl<'a, Buf> Handles<'a, Buf> {
    fn len(&self) -> usize {
        match self {
            Self::Direct(buffers) => buffers.len(),
            Self::Erased(buffers, _) => buffers.len(),
        }
    }
    fn get(&self, index: usize) -> Option<&'a Buf>
    where
        Buf: Any,
    {
        match self {
            Self::Direct(buffers) => buffers.get(index),
            Self::Erased(buffers, erasures) => erasures.undo(buffers.get(index)?),
        }
    }
}

impl<'a> Handles<'a, AnyBuffer> {
    /// The same buffers as a backend's own; `None` when one is another backend's.
    fn downcast<T: Any>(self) -> Option<Handles<'a, T>> {
        let (buffers, erasures) = match self {
            Self::Direct(buffers) => (buffers, Erasures::ONE),
            Self::Erased(buffers, erasures) => (buffers, erasures.one_more()),
        };
        let own = buffers.iter().all(|buffer| erasures.undo::<T>(buffer).is_some());
        own.then_some(Handles::Erased(buffers, erasures))
    }
}

impl<'a, Buf: Any> PlaneView<'a, Buf> {
    /// A plane in buffers of the caller's own, one a segment.
    ///
    /// # Errors
    /// [`DeviceErrorKind::OutOfRange`] when there are fewer buffers than the layout has segments.
    /// The buffers' sizes are compared by the backend.
    pub fn new(layout: PlaneLayout, segments: &'a [Buf]) -> Result<Self, DeviceError> {
        if u64::from(layout.num_segments()) > to_u64(segments.len()) {
            return Err(DeviceError::new(DeviceErrorKind::OutOfRange, "plane").with_detail(
                format!(
                    "{} segments needed, {} buffers given",
                    layout.num_segments(),
                    segments.len()
                ),
            ));
        }
        let (segments, constants) = (Handles::Direct(segments), Handles::Direct(&[]));
        Ok(Self { layout, segments, constants })
    }
    /// The same plane with its constants, laid out as [`PlaneConstants`]; needed where the layout
    /// [has them](PlaneLayout::has_constants).
    #[must_use]
    pub fn with_constants(mut self, constants: &'a Buf) -> Self {
        self.constants = Handles::Direct(std::slice::from_ref(constants));
        self
    }
    /// Number of buffers.
    pub fn num_segments(&self) -> usize {
        self.segments.len()
    }
    /// Buffer of segment `index`, `None` past the last.
    pub fn segment(&self, index: usize) -> Option<&'a Buf> {
        self.segments.get(index)
    }
    /// The plane's constants: `f32` as [`PlaneConstants`] lays them out.
    pub fn constants(&self) -> Option<&'a Buf> {
        self.constants.get(0)
    }
}

impl<'a> PlaneView<'a, AnyBuffer> {
    /// The same plane in a backend's own buffers; `None` when a buffer is another backend's.
    pub(crate) fn downcast<T: Any>(self) -> Option<PlaneView<'a, T>> {
        let (segments, constants) = (self.segments.downcast()?, self.constants.downcast()?);
        Some(PlaneView { layout: self.layout, segments, constants })
    }
}

impl<Buf> PlaneView<'_, Buf> {
    /// Where rows lie.
    pub fn layout(&self) -> &PlaneLayout {
        &self.layout
    }
    /// Refuses a plane that lacks the constants its layout asks for.
    pub(crate) fn check_constants(&self) -> Result<(), PlanError> {
        let missing = self.layout.has_constants() && self.constants.len() == 0;
        if missing { Err(PlanError::ConstantsMissing) } else { Ok(()) }
    }
}

/// Every allocated plane of a group.
#[derive(Debug)]
pub struct StorageView<'a, Buf>(StorageSource<'a, Buf>);

#[derive(Debug)]
enum StorageSource<'a, Buf> {
    Direct(&'a KvStorage<Buf>),
    Erased(&'a KvStorage<AnyBuffer>, Erasures),
}

impl<Buf> Clone for StorageView<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for StorageView<'_, Buf> {}
impl<Buf> Clone for StorageSource<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for StorageSource<'_, Buf> {}

impl<'a, Buf> StorageView<'a, Buf> {
    /// Layouts of the K and the V planes.
    pub fn layouts(&self) -> &'a [PlaneLayout; 2] {
        match self.0 {
            StorageSource::Direct(storage) => storage.layouts(),
            StorageSource::Erased(storage, _) => storage.layouts(),
        }
    }
}

impl<'a, Buf: Any> StorageView<'a, Buf> {
    /// The planes, K then V, layer by layer.
    pub fn planes(self) -> impl Iterator<Item = PlaneView<'a, Buf>> {
        let (direct, erased) = match self.0 {
            StorageSource::Direct(storage) => (Some(storage), None),
            StorageSource::Erased(storage, erasures) => (None, Some((storage, erasures))),
        };
        let direct = direct.into_iter().flat_map(|storage| {
            storage.layers.iter().flatten().flat_map(|layer| {
                layer.iter().zip(storage.layouts).map(|(plane, layout)| plane.view(layout))
            })
        });
        let erased = erased.into_iter().flat_map(|(storage, erasures)| {
            storage.layers.iter().flatten().flat_map(move |layer| {
                layer.iter().zip(storage.layouts).map(move |(plane, layout)| PlaneView {
                    layout,
                    segments: Handles::Erased(&plane.segments, erasures),
                    constants: Handles::Erased(plane.constants.as_slice(), erasures),
                })
            })
        });
        direct.chain(erased)
    }
}

impl<'a> StorageView<'a, AnyBuffer> {
    /// The same planes in a backend's own buffers; `None` when a buffer is another backend's.
    pub(crate) fn downcast<T: Any>(self) -> Option<StorageView<'a, T>> {
        let (storage, erasures) = match self.0 {
            StorageSource::Direct(storage) => (storage, Erasures::ONE),
            StorageSource::Erased(storage, erasures) => (storage, erasures.one_more()),
        };
        let mut planes = storage.layers.iter().flatten().flatten();
        let own = planes.all(|plane| {
            let mut buffers = plane.segments.iter().chain(&plane.constants);
            buffers.all(|buffer| erasures.undo::<T>(buffer).is_some())
        });
        own.then_some(StorageView(StorageSource::Erased(storage, erasures)))
    }
}
