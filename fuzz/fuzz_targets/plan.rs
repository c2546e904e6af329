//! Small transfers of every kind, executed: what the plan's runs copy is what copying by coordinates copies.
#![no_main]

use std::ops::Range;
use std::sync::Arc;

use kvferry_fuzz::{Case, Made, bind, limit_allocations};
use kvferry_layout::{
    Axis, BlockId, CopyPlan, PairPlan, PairRequest, PerAxis, PlanError, RegionSpan, RowChunks, Transform,
    find_overlap, oracle, step,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(
    init: limit_allocations(16 << 20),
    |case: Case| {
        case.src.check();
        case.dst.check();
        rows(&case.dst);
        let legal = legal(&case);
        let pair = match PairPlan::new(&case.src.layout, &case.dst.layout, &case.request) {
            Ok(pair) => Arc::new(pair),
            Err(error) => {
                assert!(!error.to_string().is_empty());
                if let PlanError::TransformForbidden { .. } = error {
                    let auto = PairRequest { transform: Transform::Auto, ..case.request.clone() };
                    let pair = PairPlan::new(&case.src.layout, &case.dst.layout, &auto).expect("legal but for the order");
                    assert!(pair.transforms() && case.request.transform == Transform::Forbid);
                } else {
                    assert!(legal.is_none(), "{error}");
                }
                return;
            }
        };
        let (layers, heads) = legal.expect("refused by the rules");
        let ids_fit = ids_fit(&case);
        let plan = match CopyPlan::new(pair, &case.src_ids, &case.dst_ids) {
            Ok(plan) => plan,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                assert!(!ids_fit, "{error}");
                return;
            }
        };
        assert!(ids_fit, "ids that do not fit");
        executed(&case, &plan, &layers, &heads);
        overlaps(&case, &plan, &layers, &heads);
        payload(&case);
    }
);

/// The layers and global heads that move, by the rules of `PairPlan::new`; None where they say no.
fn legal(case: &Case) -> Option<(Range<u64>, Range<u64>)> {
    let (a, b) = (case.src.sizes, case.dst.sizes);
    let fits = (a.layers, a.outer, a.dtype, a.dim, a.total_heads)
        == (b.layers, b.outer, b.dtype, b.dim, b.total_heads)
        && a.page.max(b.page).is_multiple_of(a.page.min(b.page));
    let part = |asked: &Option<Range<u64>>, holds: [Range<u64>; 2]| -> Option<Range<u64>> {
        let common = holds[0].start.max(holds[1].start)..holds[0].end.min(holds[1].end);
        let part = asked.clone().unwrap_or(common.clone());
        let inside = common.start <= part.start && part.end <= common.end;
        (inside && !part.is_empty()).then_some(part)
    };
    let layers = part(&case.request.layers, [0..a.layers, 0..b.layers])?;
    let heads = part(&case.request.heads, [case.src.heads(), case.dst.heads()])?;
    fits.then_some((layers, heads))
}

fn ids_fit(case: &Case) -> bool {
    let (a, b) = (case.src.sizes, case.dst.sizes);
    let dst = &case.dst_ids;
    case.src_ids.len() as u64 * a.page == dst.len() as u64 * b.page
        && case.src_ids.iter().all(|id| u64::from(id.0) < a.blocks)
        && dst.iter().all(|id| u64::from(id.0) < b.blocks)
        && (1..dst.len()).all(|at| !dst[..at].contains(&dst[at]))
}

/// Runs the plan over bytes and compares with copying element by element.
fn executed(case: &Case, plan: &CopyPlan, layers: &Range<u64>, heads: &Range<u64>) {
    let (src, dst) = (&case.src, &case.dst);
    let mut from = src.memory(0x5A);
    src.each(0..src.sizes.blocks, 0..src.sizes.layers, src.heads(), |at| {
        let (region, offset) = src.element(at);
        let bytes = oracle::value(1, at).to_le_bytes();
        from[region][offset..offset + src.width()].copy_from_slice(&bytes[..src.width()]);
    });

    let mut to = dst.memory(oracle::POISON);
    let mut written = dst.memory(0);
    let (mut runs, mut bytes, mut shortest, mut longest) = (0, 0, u64::MAX, 0);
    for run in plan.runs() {
        let (a, at) = (run.src.region as usize, run.src.offset as usize);
        let (b, to_at) = (run.dst.region as usize, run.dst.offset as usize);
        let len = run.bytes as usize;
        to[b][to_at..to_at + len].copy_from_slice(&from[a][at..at + len]);
        for byte in &mut written[b][to_at..to_at + len] {
            assert_eq!(*byte, 0, "a byte is written twice");
            *byte = 1;
        }
        runs += 1;
        bytes += run.bytes;
        shortest = shortest.min(run.bytes);
        longest = longest.max(run.bytes);
    }

    let mut expected = dst.memory(oracle::POISON);
    let mut moved = 0;
    let (src_page, dst_page) = (src.sizes.page, dst.sizes.page);
    dst.each(0..case.dst_ids.len() as u64, layers.clone(), heads.clone(), |at| {
        let [index, layer, outer, page, head, dim] = at;
        let token = index * dst_page + page;
        let source = case.src_ids[(token / src_page) as usize];
        let global = head + dst.sizes.first_head;
        let (a, from_at) = src.element([
            source.0.into(),
            layer,
            outer,
            token % src_page,
            global - src.sizes.first_head,
            dim,
        ]);
        let target = case.dst_ids[index as usize];
        let (b, to_at) = dst.element([target.0.into(), layer, outer, page, head, dim]);
        let width = dst.width();
        expected[b][to_at..to_at + width].copy_from_slice(&from[a][from_at..from_at + width]);
        moved += width as u64;
    });
    assert_eq!(to, expected);

    let stats = plan.stats();
    assert_eq!((plan.bytes(), bytes), (moved, moved));
    assert_eq!((stats.bytes, stats.runs, stats.blocks), (bytes, runs, plan.blocks().into()));
    assert_eq!((stats.shortest_run, stats.longest_run), (if runs == 0 { 0 } else { shortest }, longest));
    assert!(stats.runs <= stats.elementary_runs);
    let mut before = 0;
    for segment in plan.segments() {
        assert_eq!(segment.before, before);
        before += segment.count;
        let (_, loops) = plan.shape(&segment);
        assert!(loops.iter().is_sorted_by_key(|l| l.within_regions()));
        assert!(loops.iter().all(|l| l.count > 1));
    }
    assert_eq!(before, plan.blocks());
}

/// `find_overlap` and `aliased_regions` against what each address is used for.
fn overlaps(case: &Case, plan: &CopyPlan, layers: &Range<u64>, heads: &Range<u64>) {
    let src = bind(&case.src, &case.bases[0]);
    let mut dst = bind(&case.dst, &case.bases[1]);
    if case.same_bases {
        for (to, from) in dst.iter_mut().zip(&src) {
            to.addr = from.addr;
        }
    }
    let src_alias = aliases(&case.src, &src);
    let dst_alias = aliases(&case.dst, &dst);
    let page = case.src.sizes.page.min(case.dst.sizes.page);
    let end = src.iter().chain(&dst).map(|span| span.addr + span.len).max().unwrap_or(0);
    // Which addresses a side uses, or only those of one block of the finer page.
    let used = |made: &Made, ids: &[BlockId], regions: &[RegionSpan], only: Option<u32>| {
        let mut bytes = vec![false; end as usize];
        made.each(ids.iter().map(|id| id.0.into()), layers.clone(), heads.clone(), |at| {
            let block = at[0] * (made.sizes.page / page) + at[3] / page;
            if only.is_none_or(|only| only == block as u32) {
                let (region, offset) = made.element(at);
                let start = regions[region].addr as usize + offset;
                bytes[start..start + made.width()].fill(true);
            }
        });
        bytes
    };
    let read = used(&case.src, &case.src_ids, &src, None);
    let written = used(&case.dst, &case.dst_ids, &dst, None);
    let lowest = (0..end).find(|&addr| read[addr as usize] && written[addr as usize]);
    let may = plan.pair().may_overlap(&src, &dst);
    assert!(may || lowest.is_none());
    let same_memory = plan.pair().same_view()
        && case.src.layout.num_regions() == case.dst.layout.num_regions()
        && src.iter().zip(&dst).all(|(a, b)| a.addr == b.addr);
    if src_alias || dst_alias {
        // Regions of one layout must not share bytes among themselves; any verdict, but no panic.
        let _ = find_overlap(plan, &src, &dst);
        return;
    }
    match (find_overlap(plan, &src, &dst), lowest) {
        (Ok(()), None) => {}
        (Err(PlanError::Overlap { src: s, dst: d, addr }), Some(lowest)) => {
            let reads = used(&case.src, &case.src_ids, &src, Some(s));
            let writes = used(&case.dst, &case.dst_ids, &dst, Some(d));
            assert!(reads[addr as usize], "block {s} does not read {addr}");
            assert!(writes[addr as usize], "block {d} does not write {addr}");
            assert!(same_memory || addr == lowest, "the lowest shared address is {lowest}, not {addr}");
        }
        (got, expected) => panic!("{got:?}, but the lowest shared address is {expected:?}"),
    }
}

/// Whether regions share bytes, checked against every byte.
fn aliases(made: &Made, regions: &[RegionSpan]) -> bool {
    let end = regions.iter().map(|span| span.addr + span.len).max().unwrap_or(0);
    let mut owner = vec![0u16; end as usize];
    let mut shared = false;
    let mut covers = vec![Vec::new(); regions.len()];
    made.each(0..made.sizes.blocks, 0..made.sizes.layers, made.heads(), |at| {
        let (region, offset) = made.element(at);
        let start = regions[region].addr as usize + offset;
        covers[region].push(start);
        for byte in &mut owner[start..start + made.width()] {
            shared |= *byte != 0 && *byte != region as u16 + 1;
            *byte = region as u16 + 1;
        }
    });
    match made.layout.aliased_regions(regions) {
        None => assert!(!shared, "regions share bytes"),
        Some((a, b)) => {
            let meet = |at: &usize| covers[b].iter().any(|other| at.abs_diff(*other) < made.width());
            assert!(a < b && covers[a].iter().any(meet), "regions {a} and {b} share nothing");
        }
    }
    shared
}

/// Payload of the source blocks against the bytes of their elements.
fn payload(case: &Case) {
    let made = &case.src;
    let mut regions = bind(made, &case.bases[0]);
    if aliases(made, &regions) {
        // Apart instead.
        let stride = made.layout.region_bytes().next_multiple_of(made.layout.config().alignment());
        for (index, span) in regions.iter_mut().enumerate() {
            span.addr = index as u64 * stride;
        }
    }
    let end = regions.iter().map(|span| span.addr + span.len).max().unwrap_or(0);
    let mut expected = vec![false; end as usize];
    made.each(case.src_ids.iter().map(|id| id.0.into()), 0..made.sizes.layers, made.heads(), |at| {
        let (region, offset) = made.element(at);
        let start = regions[region].addr as usize + offset;
        expected[start..start + made.width()].fill(true);
    });
    let payload = made.layout.payload(&regions, &case.src_ids).expect("ids and regions fit");
    let mut found = vec![false; end as usize];
    for run in &payload {
        found[run.start as usize..run.end as usize].fill(true);
    }
    assert_eq!(found, expected);
    assert!(payload.windows(2).all(|pair| pair[0].end < pair[1].start));
    let outside = made.layout.outside_payload(&regions, &case.src_ids).expect("ids and regions fit");
    let mut rest = 0;
    for part in &outside {
        let base = regions[part.region].addr;
        let bytes = &expected[(base + part.bytes.start) as usize..(base + part.bytes.end) as usize];
        assert!(!bytes.is_empty() && bytes.iter().all(|&is_payload| !is_payload));
        rest += bytes.len();
    }
    let inside: usize = regions
        .iter()
        .map(|span| {
            expected[span.addr as usize..(span.addr + span.len) as usize].iter().filter(|&&p| !p).count()
        })
        .sum();
    assert_eq!(rest, inside);
}

/// Chunks of rows visit every row once, in order, where it lies.
fn rows(made: &Made) {
    let s = made.sizes;
    for max_bytes in [0, 24, u64::MAX] {
        let chunks = RowChunks::new(made.layout.view(), max_bytes).expect("small coordinates");
        let mut count = 0;
        let block = s.blocks - 1;
        let mut last = None;
        for index in 0..chunks.per_block() {
            let chunk = chunks.chunk(BlockId(block as u32), index);
            assert!(chunk.tokens >= 1 && chunk.tokens <= chunks.max_tokens());
            // Gathers the places of elements instead of their bytes.
            let (run, loops) = chunks.gather(chunk.tokens);
            let width = made.width() as u64;
            let mut dense = vec![None; (chunks.chunk_bytes(chunk.tokens) / width) as usize];
            let start = kvferry_layout::Place { region: 0, offset: 0 };
            for iteration in 0..loops.iter().map(|l| l.count).product() {
                let (from, to) = step(&loops, iteration, chunk.place, start);
                for byte in (0..run).step_by(width as usize) {
                    let slot = &mut dense[((to.offset + byte) / width) as usize];
                    assert!(slot.is_none());
                    *slot = Some((from.region as usize, (from.offset + byte) as usize));
                }
            }
            let mut slots = dense.into_iter();
            for row in chunks.rows(&chunk) {
                assert!(last < Some(row));
                last = Some(row);
                for dim in 0..s.dim {
                    let at = [block, row.layer, row.outer, row.token, row.head - s.first_head, dim];
                    assert_eq!(slots.next(), Some(Some(made.element(at))));
                }
                count += 1;
            }
        }
        assert_eq!(count, s.layers * s.outer * s.page * s.heads);
        assert_eq!(chunks.block_bytes(), count * chunks.row_bytes());
    }
    let last = PerAxis::from_fn(|axis| made.layout.view().extent(axis) - 1);
    assert_eq!(last[Axis::Block] + 1, s.blocks);
}
