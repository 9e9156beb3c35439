package services_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/agenttest"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/service"
	"pilaster.io/pilaster/internal/tenant"
)

var (
	blueKey = address.Key{1}
	blue    = tenant.Tenant{
		Name: "blue", IDs: []tenant.ID{{ID: 1, Key: blueKey}}, ServicesNumber: 5, Addressing: tenant.Encrypted,
	}
	nodes = map[string]netip.Prefix{
		"n1": netip.MustParsePrefix("fd70:696c:6100:1::/64"), "n2": netip.MustParsePrefix("fd70:696c:6100:2::/64"),
	}
)

// plain is the plaintext address of a container of tenant id 1.
func plain(node string, index int) netip.Addr { return under(node, 1, index) }

func under(node string, id address.TenantID, index int) netip.Addr {
	return address.Plain{Node: nodes[node], Tenant: id, App: 7, Index: address.Index(index)}.Addr()
}

// vip is the address of a service of tenant blue.
func vip(n int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fd70:696c:7300:5::%x", n)) }

// web is a service of tenant blue with port 80 on 8080 of containers with app=web.
func web() service.Service {
	return service.Service{
		Tenant: "blue", Name: service.Name{Name: "web"}, Address: vip(1), Selector: map[string]string{"app": "web"},
		Ports: []service.Port{{Protocol: service.TCP, Port: 80, Target: 8080}},
	}
}

// slice has endpoints of service web on a node.
func slice(node string, addrs ...netip.Addr) service.Slice {
	s := service.Slice{
		Tenant: "blue", Service: service.Name{Name: "web"}, Name: node + ".0", Node: node, Zone: "z" + node[1:],
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, service.Endpoint{Address: a})
	}
	return s
}

// bed has the manager of node n1 in zone z1, between a fake packet path and a fake orchestrator.
type bed struct {
	*services.Manager
	*agenttest.Frontends
	t *testing.T

	mu      sync.Mutex
	hosted  map[string]tenant.Tenant
	synced  map[string]bool
	records []endpoint.Record
	sent    [][]service.Slice
	calls   int
	answer  func([]service.Slice) error // of reports; nil: they succeed
	silent  bool                        // the stream does not send what was reported
	during  func()                      // runs once, while the containers of the node are read
}

// run calls test with a running manager, with a clock that advances when all wait.
func run(t *testing.T, test func(*bed)) { runWith(t, nil, test) }

// runWith is run with containers that an earlier process has recorded.
func runWith(t *testing.T, records []endpoint.Record, test func(*bed)) {
	synctest.Test(t, func(t *testing.T) {
		b := &bed{
			records: records,
			t:       t, Frontends: agenttest.NewFrontends(), hosted: map[string]tenant.Tenant{"blue": blue},
			synced: map[string]bool{},
		}
		b.Manager = services.New(services.Config{
			Node: "n1", Zone: "z1", Plan: address.DefaultPlan(), Tenants: b, Driver: b.Frontends, Reporter: b,
			Endpoints: func() []endpoint.Record {
				b.mu.Lock()
				defer b.mu.Unlock()
				if during := b.during; during != nil {
					b.during = nil
					b.mu.Unlock()
					during()
					b.mu.Lock()
				}
				return slices.Clone(b.records)
			},
			Addresses: services.Addresses{Ports: []netip.Addr{netip.MustParseAddr("fd70:696c:6100:1::1")}},
			Log:       slog.New(slog.DiscardHandler),
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); b.Run(ctx) }()
		defer func() { cancel(); <-ended }()
		test(b)
	})
}

func (b *bed) IsHosted(name string) bool { _, ok := b.Tenant(name); return ok }

func (b *bed) Tenant(name string) (tenant.Tenant, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t, ok := b.hosted[name]
	return t, ok
}

func (b *bed) SetServicesSynced(name string, synced bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.synced[name] = synced
}

func (b *bed) PutEndpoints(_ context.Context, batch []service.Slice) error {
	b.mu.Lock()
	b.sent = append(b.sent, batch)
	b.calls++
	answer, silent := b.answer, b.silent
	b.mu.Unlock()
	if answer != nil {
		if err := answer(batch); err != nil {
			return err
		}
	}
	if silent {
		return nil
	}
	for _, s := range batch {
		if len(s.Endpoints) == 0 {
			ended := []services.SliceName{{Service: s.Service, Name: s.Name}}
			b.Apply(services.Update{Tenant: s.Tenant, EndedSlices: ended})
			continue
		}
		b.Apply(services.Update{Tenant: s.Tenant, Slices: []service.Slice{s}})
	}
	return nil
}

// add adds containers to the node.
func (b *bed) add(records ...endpoint.Record) {
	b.mu.Lock()
	b.records = append(b.records, records...)
	b.mu.Unlock()
	b.EndpointsChanged("blue")
	synctest.Wait()
}

// change changes the container with an id; it goes if to returns false.
func (b *bed) change(id endpoint.ID, to func(*endpoint.Record) bool) {
	b.mu.Lock()
	var stay []endpoint.Record
	for _, r := range b.records {
		if r.ID != id || to(&r) {
			stay = append(stay, r)
		}
	}
	b.records = stay
	b.mu.Unlock()
	b.EndpointsChanged("blue")
	synctest.Wait()
}

// container is one of tenant blue on n1.
func container(id int, labels map[string]string) endpoint.Record {
	return endpoint.Record{
		ID: endpoint.ID(id), ContainerID: fmt.Sprint("c", id), Tenant: "blue", Labels: labels, State: endpoint.Active,
		Attachments: []endpoint.Attachment{{Network: tenant.Netpila, Plaintext: plain("n1", id)}},
	}
}

var isWeb = map[string]string{"app": "web"}

// apply applies an update of tenant blue, and waits until it is written.
func (b *bed) apply(u services.Update) {
	u.Tenant = "blue"
	b.Apply(u)
	synctest.Wait()
}

// check compares the frontends, each as "address:port/protocol affinity: backends; draining", with addresses as
// containers see them, and ports. Exposed ones have "outside", or "node", and the tenant's number before the colon.
func (b *bed) check(want ...string) {
	b.t.Helper()
	var is []string
	for key, f := range b.All() {
		text := fmt.Sprintf("%v/%d %v", key.Address, key.Protocol, f.Affinity)
		if f.Exposed != (dpapi.Exposed{}) {
			text += fmt.Sprint(map[bool]string{false: " outside ", true: " node "}[f.Exposed.Node], f.Exposed.Services)
		}
		text += ":"
		for _, e := range f.Backends {
			text += fmt.Sprintf(" %s:%d", b.name(e.Plain, e.Seen), e.Port)
		}
		for _, e := range f.Draining {
			text += fmt.Sprintf(" (%s:%d)", b.name(e.Plain, e.Seen), e.Port)
		}
		is = append(is, text)
	}
	slices.Sort(is)
	if slices.Sort(want); !slices.Equal(is, want) {
		b.t.Errorf("frontends:\n%s\nwant:\n%s", strings.Join(is, "\n"), strings.Join(want, "\n"))
	}
}

// name returns node, index and the key of an address, or what is wrong with it.
func (b *bed) name(plain, seen netip.Addr) string {
	p := address.Split(plain)
	for node, prefix := range nodes {
		if p.Node != prefix {
			continue
		}
		t, _ := b.Tenant("blue")
		if t.Addressing == tenant.Clear && seen == plain {
			return fmt.Sprintf("%s/%d clear", node, p.Index)
		}
		for _, id := range t.IDs {
			if id.ID == p.Tenant && address.NewCipher(id.Key).Encrypt(plain) == seen {
				return fmt.Sprintf("%s/%d", node, p.Index)
			}
		}
	}
	return fmt.Sprintf("%v as %v", plain, seen)
}

// stored returns what was reported last of each slice, as "service slice zone: indexes".
func (b *bed) stored() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	last := map[string]string{}
	for _, batch := range b.sent {
		for _, s := range batch {
			key, text := fmt.Sprint(s.Service, " ", s.Name, " ", s.Zone), ":"
			for _, e := range s.Endpoints {
				text += fmt.Sprint(" ", address.Split(e.Address).Index)
			}
			if last[key] = text; len(s.Endpoints) == 0 {
				maps.DeleteFunc(last, func(k, _ string) bool {
					return strings.HasPrefix(k, fmt.Sprint(s.Service, " ", s.Name, " "))
				})
			}
		}
	}
	var all []string
	for key, text := range last {
		all = append(all, key+text)
	}
	slices.Sort(all)
	return all
}

func (b *bed) checkStored(want ...string) {
	b.t.Helper()
	if is := b.stored(); !slices.Equal(is, want) {
		b.t.Errorf("reported %q, want %q", is, want)
	}
}

// reports returns how many reports there were.
func (b *bed) reports() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.sent)
}

func (b *bed) set(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
}

func (b *bed) checkProblems(want ...string) {
	b.t.Helper()
	is := b.Status(false).Problems
	if len(is) != len(want) {
		b.t.Fatalf("problems %q, want %q", is, want)
	}
	for i := range want {
		if !strings.Contains(is[i], want[i]) {
			b.t.Errorf("problem %q, want %q", is[i], want[i])
		}
	}
}
