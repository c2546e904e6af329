//! From a scenario to the programs of its agents.

use crate::launch::{ADVANCE, ALL, OWN, POST, WAIT_ARRIVALS, WAIT_HEADERS};
use crate::model::{Agent, Instr, Model, Op, Role};
use crate::protocol::{Fence, Landing, Refusal};
use crate::scenario::{Act, Call, Engine, Rank, Scenario, Watch, Word};
use crate::state::Shape;

/// The stream of the copy engine.
const COPIES: u8 = 2;

/// A point in a stream: agent and position.
type Event = (usize, u8);

/// Makes a scenario ready to run.
pub(crate) fn compile(scenario: &Scenario) -> Model {
    let mut model = Model {
        protocol: scenario.protocol,
        timeouts: scenario.timeouts,
        ignored: scenario.ignored.clone(),
        reduced: scenario.reduced,
        shape: Shape::new([0, 0], 0, 0, 0, 0),
        agents: Vec::new(),
        kernels: Vec::new(),
        calls: Vec::new(),
        lanes_by_rank: scenario.ranks.iter().map(|rank| rank.lanes.clone()).collect(),
        hosts: Vec::new(),
        syncs: Vec::new(),
        barriers: Vec::new(),
    };
    let mut ctas = 0;
    for (number, rank) in scenario.ranks.iter().enumerate() {
        Compiler::new(&mut model, &mut ctas, number, rank).run(rank);
    }
    let places = model.calls.iter().flatten().map(|call| call.place.max(call.named.unwrap_or(0)));
    let slots = match scenario.protocol.landing {
        Landing::Posted => 1,
        Landing::Slots(count) => count,
    };
    let buffers = usize::from(places.map(|place| place + 1).max().unwrap_or(1).max(slots));
    assert!(buffers <= 4, "a header names four buffers at most");
    let own = scenario.ranks.iter().flat_map(|rank| rank.lanes.iter().copied());
    let lanes = own.chain(model.calls.iter().flatten().filter_map(|call| call.lanes)).max().unwrap_or(1);
    assert!(lanes <= 3, "a header announces three arrivals at most");
    let world = scenario.ranks.len();
    model.shape = Shape::new(
        [model.agents.len(), ctas],
        world,
        scenario.protocol.parities,
        buffers,
        usize::from(lanes.max(1)),
    );
    model
}

pub(crate) struct Compiler<'a> {
    pub(crate) model: &'a mut Model,
    pub(crate) rank: usize,
    pub(crate) world: usize,
    host: usize,
    pub(crate) streams: Vec<usize>,
    pub(crate) ctas: Vec<usize>,
    /// End of each call in its stream.
    ends: Vec<Event>,
    /// Who has used the result of each call: streams, home first.
    users: Vec<Vec<u8>>,
    /// What the next call into a buffer waits for.
    fences: Vec<(u8, Event)>,
}

impl<'a> Compiler<'a> {
    fn new(model: &'a mut Model, ctas: &mut usize, rank: usize, plan: &Rank) -> Compiler<'a> {
        let mut agent = |role, name: String| {
            model.agents.push(Agent { name: format!("r{rank}.{name}"), rank, role, code: Vec::new() });
            model.agents.len() - 1
        };
        let host = agent(Role::Host, "host".into());
        if plan.watch != Watch::Absent {
            agent(Role::Watch, "watch".into());
        }
        let used = |act: &Act| match act {
            Act::Call(call) if call.engine == Engine::Copy => COPIES,
            Act::Call(call) => call.stream,
            Act::Consume { stream, .. } => *stream,
            _ => 0,
        };
        let last = plan.acts.iter().map(used).max().unwrap_or(0);
        let streams: Vec<usize> =
            (0..=last).map(|stream| agent(Role::Stream, format!("stream{stream}"))).collect();
        // One more for the own share beside the copy engine.
        let extra = plan.acts.iter().any(|act| matches!(act, Act::Call(call) if call.engine == Engine::Copy));
        let grid = plan.grid + u8::from(extra);
        let slots = (0..grid).map(|cta| {
            *ctas += 1;
            agent(Role::Cta(*ctas - 1), format!("cta{cta}"))
        });
        let ctas = slots.collect();
        model.hosts.push(host);
        let calls = plan.acts.iter().filter_map(|act| match act {
            Act::Call(call) => Some(*call),
            _ => None,
        });
        model.calls.push(calls.collect());
        let world = plan.lanes.len();
        Compiler {
            model,
            rank,
            world,
            host,
            streams,
            ctas,
            ends: Vec::new(),
            users: Vec::new(),
            fences: Vec::new(),
        }
    }

    fn run(&mut self, plan: &Rank) {
        match plan.watch {
            Watch::Absent => {}
            Watch::AbortsAnyTime => self.emit(self.host + 1, Op::Abort, 0),
            Watch::AbortsWhenTold => {
                let resets = plan.acts.iter().filter(|act| matches!(act, Act::Reset)).count();
                (0..=resets).for_each(|_| self.emit(self.host + 1, Op::AbortWhenTold, 0));
            }
        }
        let mut barriers = 0;
        for act in &plan.acts {
            match *act {
                Act::Call(call) => {
                    self.emit(self.host, Op::Issue, 0);
                    self.call(call, plan.grid);
                }
                Act::Consume { call, stream } => {
                    self.emit(self.host, Op::Issue, 0);
                    self.consume(call, stream);
                }
                Act::Drop { call } => {
                    self.emit(self.host, Op::Drop, call);
                    self.drop(call);
                }
                Act::Sync => {
                    let ends = self.streams.iter().map(|&stream| (stream, self.position(stream)));
                    let ends = ends.collect();
                    self.model.syncs.push(ends);
                    let number = u8::try_from(self.model.syncs.len() - 1).unwrap();
                    self.emit(self.host, Op::Sync(number), 0);
                }
                Act::Barrier => {
                    if self.model.barriers.len() == barriers {
                        self.model.barriers.push(Vec::new());
                    }
                    let at = (self.host, self.position(self.host));
                    self.model.barriers[barriers].push(at);
                    self.emit(self.host, Op::Barrier(u8::try_from(barriers).unwrap()), 0);
                    barriers += 1;
                }
                Act::Reset => self.emit(self.host, Op::Reset, 0),
            }
        }
    }

    pub(crate) fn position(&self, agent: usize) -> u8 {
        u8::try_from(self.model.agents[agent].code.len()).unwrap()
    }

    /// Appends an instruction; streams' instructions wait until the host has come as far as it is now.
    pub(crate) fn emit(&mut self, agent: usize, op: Op, call: u8) {
        let issued = self.position(self.host);
        self.model.agents[agent].code.push(Instr { op, call, skip: 0, issued });
    }

    fn wait_event(&mut self, stream: u8, (other, position): Event) {
        let agent = self.streams[usize::from(stream)];
        if other != agent {
            self.emit(agent, Op::WaitEvent { stream: u8::try_from(other).unwrap(), position }, 0);
        }
    }

    fn record(&mut self, stream: u8) -> Event {
        let agent = self.streams[usize::from(stream)];
        self.emit(agent, Op::Record, 0);
        (agent, self.position(agent))
    }

    fn consume(&mut self, call: u8, stream: u8) {
        let index = usize::from(call) - 1;
        self.wait_event(stream, self.ends[index]);
        let place = match self.model.protocol.landing {
            Landing::Posted => self.model.call(self.rank, call).place,
            Landing::Slots(count) => call % count,
        };
        self.emit(self.streams[usize::from(stream)], Op::Consume { place }, call);
        self.users[index].push(stream);
    }

    fn drop(&mut self, call: u8) {
        let users = &self.users[usize::from(call) - 1];
        let streams = match self.model.protocol.fence {
            Fence::EveryStream => users.clone(),
            Fence::HomeStream => users[..1].to_vec(),
            Fence::Nothing => Vec::new(),
        };
        let place = self.model.call(self.rank, call).place;
        for stream in streams {
            // Same stream, same order: only other streams need an event, and which will call next is not known yet.
            if self.streams.len() > 1 {
                let event = self.record(stream);
                self.fences.push((place, event));
            }
        }
    }

    fn call(&mut self, call: Call, grid: u8) {
        let number = u8::try_from(self.ends.len() + 1).unwrap();
        let (fences, rest) = self.fences.iter().partition(|(place, _)| *place == call.place);
        self.fences = rest;
        for (_, event) in fences {
            self.wait_event(call.stream, event);
        }
        if let Some(&last) = self.ends.last() {
            self.wait_event(call.stream, last);
        }
        let whole = 0..usize::from(grid);
        match call.engine {
            _ if call.word == Word::Refused => {
                let headers = self.model.protocol.refusal == Refusal::Continue;
                let parts = POST | ADVANCE | if headers { WAIT_HEADERS } else { 0 };
                self.kernel(&call, number, parts, 0..1);
            }
            _ if call.word == Word::Unsaid => {}
            Engine::Push => self.kernel(&call, number, ALL, whole),
            Engine::HeaderKernelFirst => {
                self.kernel(&call, number, POST | WAIT_HEADERS, 0..1);
                self.kernel(&call, number, ALL & !POST, whole);
            }
            Engine::Copy => self.copies(&call, number),
        }
        let stream = self.streams[usize::from(call.stream)];
        self.ends.push((stream, self.position(stream)));
        self.users.push(vec![call.stream]);
    }

    fn copies(&mut self, call: &Call, number: u8) {
        let targets: Vec<usize> = (0..self.world).filter(|&target| target != self.rank).collect();
        let own = self.ctas.len() - 1;
        let copies = self.streams[usize::from(COPIES)];
        self.kernel(call, number, POST | WAIT_HEADERS, 0..1);
        let headers = self.record(call.stream);
        self.kernel(call, number, OWN, own..own + 1);
        self.emit(self.streams[usize::from(call.stream)], Op::Arrive, number);
        let own = self.record(call.stream);
        self.wait_event(COPIES, headers);
        for &target in &targets {
            self.emit(copies, Op::Copy { target: u8::try_from(target).unwrap() }, number);
        }
        self.wait_event(COPIES, own);
        for &target in &targets {
            self.emit(copies, Op::CopyFlag { target: u8::try_from(target).unwrap() }, number);
        }
        let flags = self.record(COPIES);
        self.wait_event(call.stream, flags);
        self.kernel(call, number, WAIT_HEADERS | WAIT_ARRIVALS | ADVANCE, 0..1);
    }
}
