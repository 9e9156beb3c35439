package sharing

import (
	"errors"
	"io"
	"math"
	"testing"
	"testing/synctest"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// measured is a node and what its packet path has counted.
type measured struct {
	roles     []agent.Role
	endpoints []endpoint.Record
	messages  map[uint32]dpapi.Messages
	work      dpapi.Work
	packets   map[int]uint64
	sessions  map[uint32]int
	counting  int
}

func (m *measured) Roles() []agent.Role                          { return m.roles }
func (m *measured) Endpoints() []endpoint.Record                 { return m.endpoints }
func (m *measured) RuleTable() dpapi.Entries                     { return dpapi.Entries{Used: 30, Capacity: 100} }
func (m *measured) RulesOf(name string) int                      { return len(name) }
func (m *measured) Messages() (map[uint32]dpapi.Messages, error) { return m.messages, nil }
func (m *measured) Work() (dpapi.Work, error)                    { return m.work, nil }
func (m *measured) DevicePackets() (map[int]uint64, error)       { return m.packets, nil }
func (m *measured) TenantSessions() (used map[uint32]int, capacity int, err error) {
	return m.sessions, 70, nil
}

func (m *measured) MeasureWork() (io.Closer, error) { m.counting++; return closer{m}, nil }

type closer struct{ *measured }

func (c closer) Close() error {
	if c.counting--; c.counting < 0 {
		return errors.New("closed twice")
	}
	return nil
}

func container(name string, device int) endpoint.Record {
	id := address.TenantID(len(name))
	return endpoint.Record{Tenant: name, TenantID: id, Device: endpoint.Device{HostIfindex: device}}
}

func mustLoad(t *testing.T, m *Meter, measure bool) *pilasterv1.NodeLoad {
	t.Helper()
	load, err := m.Load(measure)
	if err != nil {
		t.Fatal(err)
	}
	return load
}

// TestMeter: load is run time by period and budget; a frontend's is that of the programs that its packets pass, in
// proportion to them, and tenants share the rest by the packets that they sent. The kernel counts only while wanted.
func TestMeter(t *testing.T) {
	near := func(what string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > 1e-9 {
			t.Errorf("%s is %v, want %v", what, got, want)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		is := &measured{
			roles: []agent.Role{
				{Tenant: "red", Offload: tenant.Offload{ID: 7, Node: "b1"}},
				{Tenant: "red", Offload: tenant.Offload{ID: 8, Node: "b2"}},
				{Tenant: "green", Backend: true, Offload: tenant.Offload{ID: 9, Node: "own"}},
			},
			endpoints: []endpoint.Record{container("green", 3), container("blue", 4), container("green", 5)},
			messages:  map[uint32]dpapi.Messages{7: {1: 1000}, 9: {3: 100}},
			work:      dpapi.Work{Total: time.Hour, FromFabric: dpapi.Runs{Count: 100, Time: time.Hour}},
			packets:   map[int]uint64{3: 10, 4: 20, 5: 30, 6: 40},
			sessions:  map[uint32]int{4: 4, 5: 1}, // blue's and green's
		}
		m := NewMeter(is, is, 2)
		defer m.Close()
		if load := mustLoad(t, m, false); is.counting != 0 || load.Own != 0 || load.Measured || load.Fronting != nil ||
			load.Budget != 2 || load.Rules != 30 || load.RulesCapacity != 100 ||
			load.Sessions != 5 || load.SessionsCapacity != 70 ||
			len(load.Tenants) != 2 || load.Tenants[0].Tenant != "blue" || load.Tenants[1].Tenant != "green" ||
			load.Tenants[1].Rules != 5 {
			t.Errorf("with tables only: %v", load)
		}
		if load := mustLoad(t, m, true); is.counting != 1 || load.Own != 0 || load.Measured {
			t.Errorf("before the first period: counting %d, %v", is.counting, load)
		}
		time.Sleep(10 * time.Second)
		// Of 1000 packets from the fabric, 300 went by the rules to b1 and 100 were questions of b2; of 400 from the
		// tunnel, 300.
		is.messages = map[uint32]dpapi.Messages{7: {1: 1290, 2: 10}, 8: {4: 100}, 9: {3: 500}}
		is.work.Total += 10 * time.Second
		is.work.FromFabric = dpapi.Runs{Count: 1100, Time: time.Hour + 2*time.Second}
		is.work.FromTunnel = dpapi.Runs{Count: 400, Time: 4 * time.Second}
		is.work.ToFabric = dpapi.Runs{Count: 800, Time: time.Second}
		is.packets = map[int]uint64{3: 310, 4: 120, 5: 30, 6: 4000}
		load := mustLoad(t, m, true)
		b1, b2 := .3*2+.75*4+.375*1, .1*2+.125*1
		if !load.Measured || len(load.Fronting) != 2 || load.Fronting[0].Backend != "b1" ||
			load.Fronting[1].Backend != "b2" || load.Fronting[0].Tenant != "red" {
			t.Fatalf("load as a frontend is %v", load.Fronting)
		}
		near("the load for b1", load.Fronting[0].Load, b1/20)
		near("the load for b2", load.Fronting[1].Load, b2/20)
		near("the own load", load.Own, (10-b1-b2)/20)
		near("that of blue, which sent a quarter", load.Tenants[0].Load, load.Own*(.25+.8)/2)
		near("that of green", load.Tenants[1].Load, load.Own*(.75+.2)/2)
		if m.Last() != load {
			t.Error("the last load is another one")
		}
		time.Sleep(time.Second)
		is.work.Total += time.Second
		near("that of blue, if no container sends", mustLoad(t, m, true).Tenants[0].Load, .5*.8)
		time.Sleep(time.Second)
		is.sessions = nil
		if load := mustLoad(t, m, true); load.Own != 0 || !load.Measured {
			t.Errorf("an idle period: %v", load)
		}
		if load := mustLoad(t, m, false); is.counting != 0 || load.Own != 0 || load.Measured {
			t.Errorf("not wanted any more: counting %d, %v", is.counting, load)
		}
		is.work.Total += time.Hour
		if load := mustLoad(t, m, true); load.Own != 0 {
			t.Errorf("wanted again: the time before counts: %v", load)
		}
	})
}
