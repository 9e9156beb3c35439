package chaos_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// final is the content of etcd at the end.
type final struct {
	nodes     map[string]*pilasterv1.Node
	tenants   map[string]*pilasterv1.Tenant
	apps      map[string]map[string]uint32 // tenant, label
	uuids     map[string]string            // UUID: node
	deleted   map[string]string            // UUID: node
	prefixes  map[string]string            // prefix: UUID
	tenantIDs map[uint32]string            // id: tenant
	hosted    map[string]bool              // tenant
	policies  map[string]map[string]string // tenant, name: value
}

// judge returns all contradictions between the logs and the store, and all violations of invariants.
func judge(log []entry, f final) (wrong []string) {
	j := &judgement{final: f, byName: map[string][]entry{}}
	for _, e := range log {
		j.byName[e.Name] = append(j.byName[e.Name], e)
	}
	j.unique(log)
	j.store(log)
	for name, calls := range j.byName {
		switch name[0] {
		case 't':
			j.tenantHistory(name, calls)
		case 'k':
			j.keyHistory(name, calls)
		case 'p':
			j.publishedHistory(name, calls)
		case 'r':
			j.ruledHistory(name, calls)
		default:
			j.nodeHistory(name, calls)
		}
	}
	slices.Sort(j.wrong)
	return j.wrong
}

type judgement struct {
	final
	byName map[string][]entry
	wrong  []string
}

func (j *judgement) say(format string, args ...any) {
	j.wrong = append(j.wrong, fmt.Sprintf(format, args...))
}

// uuid returns the UUID of the calling machine.
func (e entry) uuid() string {
	n, err := strconv.Atoi(e.Name[1:])
	if err != nil { // a client's own machine
		if n, err = strconv.Atoi(e.Name[len("own"):]); err != nil {
			panic(e.Name)
		}
		n += ownNumber
	}
	return machine(n, e.Of)
}

// hold records the owner of a key, and reports an error if the key has had another owner.
func hold[K comparable](j *judgement, all map[K]string, key K, owner, what string) {
	if other, taken := all[key]; taken && other != owner {
		j.say("%s %v was allocated to %s and to %s", what, key, other, owner)
	}
	all[key] = owner
}

// unique checks that nothing was allocated to two owners, according to the responses that clients got.
func (j *judgement) unique(log []entry) {
	prefixes, of := map[string]string{}, map[string]string{}
	ids, made := map[uint32]string{}, map[uint32]string{}
	addresses, published := map[string]string{}, map[string]string{}
	apps, named := map[[2]uint32]string{}, map[string]string{}
	for i, e := range log {
		if e.Outcome != done {
			continue
		}
		switch e.Ask {
		case register:
			hold(j, prefixes, e.Prefix, e.uuid(), "prefix")
			hold(j, of, e.uuid(), e.Prefix, "to one machine more than one prefix: machine")
			if e.Wanted != "" && e.Wanted != e.Prefix {
				j.say("%s requested prefix %s and got %s", e.Name, e.Wanted, e.Prefix)
			}
		case create:
			hold(j, ids, e.ID, e.Name, "tenant id")
			hold(j, made, e.ID, fmt.Sprint("call ", i), "tenant id")
		case rotate:
			hold(j, ids, e.ID, e.Name, "tenant id")
		case resolve:
			hold(j, ids, e.ID, e.Name, "tenant id")
			hold(j, apps, [2]uint32{e.ID, e.App}, e.Label, "app (of tenant id)")
			hold(j, named, fmt.Sprint(e.ID, " ", e.Label), fmt.Sprint(e.App), "different apps: label set")
		case publish:
			hold(j, addresses, e.Underlay, fmt.Sprint("call ", i), "address")
		}
	}
	for name, t := range j.tenants { // includes publications of calls without a response
		for _, p := range t.Publications {
			hold(j, published, p.Underlay, name, "address")
		}
	}
}

// store checks that acknowledged allocations are in the store, and that the store has nothing that no client requested.
func (j *judgement) store(log []entry) {
	asked := map[string]bool{}
	for _, e := range log {
		switch e.Ask {
		case register:
			asked[e.uuid()+" "+e.Name] = true
			if e.Outcome != done {
				break
			}
			if owner := j.prefixes[e.Prefix]; owner != e.uuid() {
				j.say("lost: prefix %s of %s (%s) belongs to %q in the store", e.Prefix, e.Name, e.uuid(), owner)
			}
			if n := j.nodes[e.Name]; n != nil && n.Uuid == e.uuid() && n.Prefix != e.Prefix {
				j.say("node %s got prefix %s, but the store has %s", e.Name, e.Prefix, n.Prefix)
			}
		case create, rotate:
			if e.Outcome == done && j.tenantIDs[e.ID] != e.Name {
				j.say("lost: id %d of tenant %s belongs to %q in the store", e.ID, e.Name, j.tenantIDs[e.ID])
			}
		case resolve:
			if t := j.tenants[e.Name]; e.Outcome == done && t != nil && t.Ids[0].Id == e.ID &&
				j.apps[e.Name][e.Label] != e.App {
				j.say("lost: app %d of tenant %s for label %s is %d in the store", e.App, e.Name, e.Label,
					j.apps[e.Name][e.Label])
			}
		}
	}
	held := map[string]string{}
	for name, n := range j.nodes {
		hold(j, held, n.Prefix, name, "prefix (in the store)")
		if !asked[n.Uuid+" "+name] {
			j.say("the store has node %s (%s), which no client requested", name, n.Uuid)
		}
		if j.uuids[n.Uuid] != name || j.prefixes[n.Prefix] != n.Uuid || j.deleted[n.Uuid] != "" {
			j.say("node %s (%s, %s) contradicts the rest of the store: UUID of %q, prefix of %q, deleted as %q",
				name, n.Uuid, n.Prefix, j.uuids[n.Uuid], j.prefixes[n.Prefix], j.deleted[n.Uuid])
		}
	}
	ids := map[uint32]string{}
	for name, t := range j.tenants {
		for _, id := range t.Ids {
			hold(j, ids, id.Id, name, "tenant id (in the store)")
			if j.tenantIDs[id.Id] != name {
				j.say("tenant %s has id %d, which the store assigns to %q", name, id.Id, j.tenantIDs[id.Id])
			}
		}
		apps := map[uint32]string{}
		for label, id := range j.apps[name] {
			hold(j, apps, id, label, "app (in the store, of "+name+")")
		}
	}
}

// nodeState is the state of a node name, with one bit per machine: the machine that has the name, and the machines that
// had it and were deleted.
type nodeState struct{ is, deleted uint8 }

func bit(rival int) uint8 { return 1 << rival }

func (j *judgement) nodeHistory(name string, log []entry) {
	var calls []call[nodeState]
	for _, e := range log {
		if e.Outcome == refused && e.Wanted != "" {
			continue // possibly refused because another node has the prefix
		}
		calls = append(calls, call[nodeState]{e.Asked, e.Answered, e.Outcome == unknown, fmt.Sprint(e.Ask, e.Of),
			e.node})
	}
	var end nodeState
	for rival := range rivals {
		id := entry{Name: name, Of: rival}.uuid()
		if n := j.nodes[name]; n != nil && n.Uuid == id {
			end.is = bit(rival)
		}
		if j.deleted[id] == name {
			end.deleted |= bit(rival)
		}
	}
	if !linearizable(calls, nodeState{}, func(s nodeState) bool { return s == end }) {
		j.say("no order of the calls for node %s explains their results and the final state %+v:%s",
			name, end, history(log))
	}
}

func (e entry) node(s nodeState) (nodeState, bool) {
	var next nodeState
	var ok bool
	if e.Ask == register {
		ok = s.deleted&bit(e.Of) == 0 && (s.is == 0 || s.is == bit(e.Of))
		next = nodeState{bit(e.Of), s.deleted}
	} else {
		ok = s.is != 0
		next = nodeState{0, s.deleted | s.is}
	}
	return step(e, s, next, ok)
}

// step returns the state after a call: next if the call was done, and s if it was refused. It returns false if the
// outcome contradicts ok.
func step[S any](e entry, s, next S, ok bool) (S, bool) {
	if e.Outcome == refused {
		return s, !ok
	}
	return next, ok
}

// keyHistory checks a tenant that is never deleted: it was created only once, and its newest ID is not older than any
// ID that a client received.
func (j *judgement) keyHistory(name string, log []entry) {
	var made int
	var last uint32
	for _, e := range log {
		if e.Ask == create && e.Outcome == done {
			made++
		}
		last = max(last, e.ID)
	}
	t := j.tenants[name]
	switch {
	case t == nil && last != 0:
		j.say("lost: tenant %s, which was never deleted:%s", name, history(log))
	case made > 1 || t != nil && t.Ids[len(t.Ids)-1].Id < last:
		j.say("tenant %s was created %d times and got id %d, but the store has %v:%s", name, made, last, t.Ids,
			history(log))
	}
}

// tenantState is the current ID of a tenant (0 if the tenant does not exist), the highest ID so far, and whether a node
// hosts the tenant.
type tenantState struct {
	is, highest uint32
	hosted      bool
}

func (j *judgement) tenantHistory(name string, log []entry) {
	// IDs of this tenant name that no client received. A call to create the tenant that got no response must have
	// allocated each of them.
	got := map[uint32]bool{}
	for _, e := range log {
		if e.Ask == create {
			got[e.ID] = true
		}
	}
	var untold []uint32
	for id, owner := range j.tenantIDs {
		if owner == name && !got[id] {
			untold = append(untold, id)
		}
	}
	slices.Sort(untold)

	var calls []call[tenantState]
	lost := 0
	for _, e := range log {
		if e.Ask == create && e.Outcome == unknown {
			lost++
		}
		if e.Ask == resolve && e.Outcome == refused && e.Code != "not_found" {
			continue // refused because its node did not exist yet
		}
		calls = append(calls, call[tenantState]{e.Asked, e.Answered, e.Outcome == unknown, e.Ask,
			func(s tenantState) (tenantState, bool) { return e.tenant(s, untold) }})
	}
	if len(untold) > lost {
		j.say("tenant %s had ids %v that no client received, but only %d of the calls that create it had no response",
			name, untold, lost)
	}
	var end tenantState
	if t := j.tenants[name]; t != nil {
		end.is, end.hosted = t.Ids[0].Id, j.hosted[name]
	}
	for id, owner := range j.tenantIDs {
		if owner == name {
			end.highest = max(end.highest, id)
		}
	}
	if !linearizable(calls, tenantState{}, func(s tenantState) bool { return s == end }) {
		j.say("no order of the calls for tenant %s explains their results, ids %v that no client received, and the "+
			"final state %+v:%s", name, untold, end, history(log))
	}
}

func (e entry) tenant(s tenantState, untold []uint32) (tenantState, bool) {
	switch {
	case e.Ask == create && e.Outcome == unknown:
		i := slices.IndexFunc(untold, func(id uint32) bool { return id > s.highest }) // IDs increase
		if s.is != 0 || i < 0 {
			return s, false
		}
		return tenantState{untold[i], untold[i], false}, true
	case e.Ask == create:
		skipped := slices.ContainsFunc(untold, func(id uint32) bool { return id > s.highest && id < e.ID })
		return step(e, s, tenantState{e.ID, e.ID, false}, s.is == 0 &&
			(e.Outcome == refused || e.ID > s.highest && !skipped))
	case e.Ask == destroy:
		if e.Code == "failed_precondition" {
			return s, s.is != 0 && s.hosted
		}
		return step(e, s, tenantState{0, s.highest, false}, s.is != 0 && (e.Outcome == refused || !s.hosted))
	default:
		return step(e, s, tenantState{s.is, s.highest, true}, s.is != 0 && (e.Outcome != done || s.is == e.ID))
	}
}

func history(log []entry) (text string) {
	slices.SortFunc(log, func(a, b entry) int { return int(a.Asked - b.Asked) })
	for _, e := range log {
		text += fmt.Sprintf("\n  %9.4f–%9.4f s  client %d at %d: %s %s%s: %s %s", e.Asked.Seconds(),
			e.Answered.Seconds(), e.Client, e.Place, e.Ask, e.Name,
			map[bool]string{true: fmt.Sprint(" as machine ", e.Of)}[e.Ask == register], e.Outcome, e.Error)
		if e.ID != 0 {
			text += fmt.Sprintf("id %d", e.ID)
		}
		if e.Ask == rule {
			text += fmt.Sprintf("%s, of value %s", e.Change, e.Label)
		}
	}
	return text
}

// readLogs merges the logs of all clients.
func readLogs(dir string, clients int) (all []entry, err error) {
	for i := range clients {
		f, err := os.Open(logFile(dir, i))
		if err != nil {
			return nil, err
		}
		defer f.Close()
		for d := json.NewDecoder(f); ; {
			var e entry
			if err := d.Decode(&e); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, fmt.Errorf("%s: %w", f.Name(), err)
			}
			all = append(all, e)
		}
	}
	return all, nil
}
