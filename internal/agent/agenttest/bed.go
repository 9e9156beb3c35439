package agenttest

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/services"
	"pilaster.io/pilaster/internal/egress"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/network/evpn"
	"pilaster.io/pilaster/internal/network/netpila"
	"pilaster.io/pilaster/internal/network/nimitz"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// Bed has a core between a fake data path and a fake orchestrator, on a disk that outlives the core.
type Bed struct {
	T            *testing.T
	Dir          string
	Driver       *Driver
	Orchestrator *Orchestrator
	Max, MaxIDs  int
	Now          time.Time
	Nimitz       *Switch // nil: the node does not have it
	EVPN         *Switch // nil: the node does not have it
	Edge         bool
	MTUReserve   int                // enough for offloads
	MaxMappings  int                // 0: as many as the network takes by itself
	Tried        <-chan struct{}    // of the core's configuration
	Damages      *statefile.Damages // sets damaged files aside; nil: the core does not start
	Store        *endpoint.Store
	Tenants      *agent.Tenants
	Networks     map[string]agent.Network
	Egress       *egress.Addresses
	Reports      Reports           // of endpoints of services
	Reporter     services.Reporter // takes them instead of Reports
	*agent.Core
}

// New returns a bed with a started core of network netpila, whose orchestrator has tenants blue and red.
func New(t *testing.T) *Bed {
	t.Helper()
	b := &Bed{
		T:            t,
		Dir:          t.TempDir(),
		Driver:       NewDriver(),
		Orchestrator: NewOrchestrator(),
		Now:          time.Unix(1e9, 0),
		MTUReserve:   tenant.OffloadOverhead,
	}
	b.Reopen()
	return b
}

// Reopen replaces the core as a restart does: the new one reads the disk and finds the data path unchanged.
func (b *Bed) Reopen() {
	b.T.Helper()
	if err := b.TryReopen(); err != nil {
		b.T.Fatal(err)
	}
}

// TryReopen is Reopen that returns the error.
func (b *Bed) TryReopen() error {
	var err error
	b.Store, err = endpoint.OpenStore(
		endpoint.StoreConfig{Dir: b.Dir, Now: func() time.Time { return b.Now }, Damages: b.Damages},
	)
	if err != nil {
		return err
	}
	if b.Tenants, err = agent.OpenTenantsWith(statefile.Disk{}, b.Damages, b.Dir); err != nil {
		return err
	}
	if b.Egress, err = egress.Open(egress.Config{
		Dir: b.Dir, Plan: address.DefaultPlan(), Node: NodePrefix, Records: b.Store.List(),
		Now: func() time.Time { return b.Now }, Log: slog.New(slog.DiscardHandler),
	}); err != nil {
		return err
	}
	own, err := netpila.New(network.Node{
		Plan: address.DefaultPlan(), Prefix: NodePrefix, Indexes: b.Store, Egress: b.Egress,
	}, b.Driver.Path())
	if err != nil {
		return err
	}
	b.Networks = map[string]agent.Network{netpila.Name: own}
	if b.Nimitz != nil {
		b.Networks[nimitz.Name] = nimitz.New(
			nimitz.Config{
				Plan:        address.DefaultPlan(),
				Node:        NodePrefix,
				Edge:        b.Edge,
				MaxMappings: b.MaxMappings,
				Indexes:     b.Store,
				Cluster:     b.Nimitz,
				Switch:      b.Nimitz,
				Kind:        "fake",
			},
		)
	}
	if b.EVPN != nil {
		b.Networks[evpn.Name] = evpn.New(evpn.Config{
			Node: network.Node{
				Plan: address.DefaultPlan(), Prefix: NodePrefix, Indexes: b.Store, Cluster: b.Nimitz,
			},
			Pool: netip.MustParsePrefix("10.71.0.0/16"), Switch: b.EVPN,
		})
	}
	var reporter services.Reporter = &b.Reports
	if b.Reporter != nil {
		reporter = b.Reporter
	}
	b.Core, err = agent.New(agent.Config{
		Store: b.Store, Tenants: b.Tenants,
		Networks: b.Networks, Absent: map[string]string{nimitz.Name: "--some switch", evpn.Name: "--some pool"},
		Driver: b.Driver, Resolver: b.Orchestrator, Tried: b.Tried, Egress: b.Egress, Name: "n1", Zone: "z1",
		Reporter: reporter, Addresses: services.Addresses{Ports: []netip.Addr{tenant.NodeAddress(NodePrefix)}},
		Plan: address.DefaultPlan(), Node: NodePrefix, Edge: b.Edge, MTUReserve: b.MTUReserve,
		MaxEndpoints: b.Max, MaxTenantIDs: b.MaxIDs,
		Now: func() time.Time { return b.Now }, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	return b.Start(b.T.Context())
}

// Request is an ADD of tenant blue.
func (b *Bed) Request(container string) agent.AddRequest {
	return agent.AddRequest{
		ContainerID: container, Interface: "eth0", Netns: "/run/netns/" + container, OpenNetns: "/proc/self/fd/9",
		Tenant: "blue", Labels: map[string]string{"app": "web", "pod-template-hash": container}, Pod: "default/" +
			container, CNINetwork: "pilaster",
	}
}

// MustAdd adds the endpoint of Request; the test fails after an error.
func (b *Bed) MustAdd(container string) endpoint.Record {
	b.T.Helper()
	r, err := b.Add(b.T.Context(), b.Request(container))
	if err != nil {
		b.T.Fatal(err)
	}
	return r
}

// CheckClean fails the test if anything of an endpoint or a tenant remains.
func (b *Bed) CheckClean() {
	b.T.Helper()
	if err := b.Driver.Empty(); err != nil {
		b.T.Error(err)
	}
	if records := b.Endpoints(); len(records) > 0 {
		b.T.Errorf("records are left: %+v", records)
	}
	if names := b.Tenants.Names(); len(names) > 0 {
		b.T.Errorf("tenants are left: %v", names)
	}
	if used := b.Limits()[0]; used.Used > 0 {
		b.T.Errorf("ids are left: %+v", used)
	}
}

// NewWithTwoNetworks is New with a second network, nimitz, and with tenant green on it.
func NewWithTwoNetworks(t *testing.T) *Bed {
	b := New(t)
	b.Orchestrator.Tenants["green"] = tenant.Tenant{
		Name: "green", Network: tenant.Nimitz, Addressing: tenant.Own, IDs: []tenant.ID{{ID: 3, Key: address.Key{3}}},
		Overlays: []tenant.Overlay{{CIDR: netip.MustParsePrefix("10.0.0.0/16"), NodeBits: 24}},
	}
	b.Nimitz = NewSwitch()
	b.Reopen()
	return b
}

// Green is an ADD of tenant green.
func (b *Bed) Green(container string) agent.AddRequest {
	q := b.Request(container)
	q.Tenant = "green"
	return q
}

// Eventually repeats try until it succeeds. After half a minute the test fails.
func Eventually(t *testing.T, try func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	t.Fatal(err)
}
