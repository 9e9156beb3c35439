package sim

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/control"
	"pilaster.io/pilaster/internal/agent/refusal"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/modules"
	"pilaster.io/pilaster/internal/network"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/statefile"
	"pilaster.io/pilaster/internal/tenant"
)

// node is a simulated machine: the state that survives its agent, and the agent.
type node struct {
	number   int
	name     string
	instance string // boot ID; changes when the machine boots
	disk     statefile.Disk
	driver   *driver
	counted  *entryCounter // tables of a network without mappings
	mapped   *mappedSwitch // the switch of one with mappings
	asks     bool          // queries for mappings instead of receiving them on its stream
	asked    int64         // revision of its last query
	made     int           // containers created so far
	running  []container

	who      *state.Node
	clients  pilasterv1connect.NodeServiceClient // shared by all nodes
	caller   *caller
	received *mappedNetwork
	store    *endpoint.Store
	link     *control.Link
	core     *agent.Core
	stop     context.CancelFunc // of the agent; nil while none runs
	done     chan struct{}      // closed when the agent has ended
}

// container is a container of the node's runtime.
type container struct{ id, tenant string }

// stateDir is the agent's state folder on its simulated disk.
const stateDir = "/var/lib/pilaster"

// containerInterface is the name of the network interface in containers.
const containerInterface = "eth0"

func (w *world) newNode(number int, d statefile.Disk) *node {
	n := &node{
		number:   number,
		name:     fmt.Sprintf("n%d", number),
		instance: join.NewUUID(),
		disk:     d,
		driver:   &driver{names: w.devices},
		counted:  newEntryCounter(),
		mapped:   newMappedSwitch(w.numbers),
	}
	n.asks = w.scenario.asks() && number <= w.scenario.Nodes
	return n
}

// start boots the node and, once the node follows the orchestrator, creates its containers as a scheduler does.
func (n *node) start(ctx context.Context, w *world) error {
	if w.followers > 0 && n.number > w.followers {
		return n.visit(ctx, w)
	}
	if err := n.boot(ctx, w); err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	if err := w.await(ctx, []*node{n}, time.Time{}); err != nil {
		return err
	}
	return n.fill(ctx, w)
}

// visit creates the node's containers and then ends its agent, which never follows the orchestrator. The node keeps its
// allocations.
func (n *node) visit(ctx context.Context, w *world) error {
	if err := n.open(ctx, w); err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	if err := n.fill(ctx, w); err != nil {
		return err
	}
	n.forget()
	return nil
}

// boot starts the node's agent and its link to the orchestrator.
func (n *node) boot(ctx context.Context, w *world) error {
	if err := n.open(ctx, w); err != nil {
		return err
	}
	n.follow(w)
	return nil
}

// open starts the node's agent as package agent's daemon does, and registers a new node.
func (n *node) open(ctx context.Context, w *world) error {
	var err error
	if n.who, err = state.OpenNodeOn(n.disk, stateDir, n.name); err != nil {
		return err
	}
	tenants, err := agent.OpenTenantsOn(n.disk, stateDir)
	if err != nil {
		return err
	}
	if n.store, err = endpoint.OpenStore(endpoint.StoreConfig{Dir: stateDir, Disk: n.disk}); err != nil {
		return err
	}
	n.clients, n.caller = w.clients, newCaller(pki.Node{Name: n.name, UUID: n.who.UUID()}, n.instance, time.Now())
	ctx = n.as(ctx)
	n.link = control.New(control.Config{
		URL: w.url, Version: w.version, Node: n.who, Tenants: tenants, Endpoints: n.store.WithClusterAddresses,
		Enforces:        func() []string { return tenant.Networks() },
		UplinkAddresses: func() ([]netip.Addr, error) { return w.uplink, nil },
		WithoutMappings: n.asks,
		Dial:            func(context.Context) (pilasterv1connect.NodeServiceClient, error) { return n.clients, nil },
		Log:             w.agentLog,
	})
	if _, ok := n.who.Membership(); !ok {
		if err := n.link.Register(ctx); err != nil {
			return err
		}
	}
	m, _ := n.who.Membership()
	networks, err := n.networks(w, m)
	if err != nil {
		return err
	}
	if n.core, err = agent.New(agent.Config{
		Store: n.store, Tenants: tenants, Networks: networks,
		Driver: n.driver, Resolver: n.link, Reporter: n.link, Plan: m.Plan, Name: n.name, Node: m.Prefix,
		MTUReserve: tenant.OffloadOverhead, Log: w.agentLog,
	}); err != nil {
		return err
	}
	return n.core.Start(ctx)
}

// networks opens the scenario's network with its real address allocation, over a packet path that counts.
func (n *node) networks(w *world, m state.Membership) (map[string]agent.Network, error) {
	name := w.scenario.Network
	of, known := modules.Of(name)
	if !known {
		return nil, fmt.Errorf("there is no network %q", name)
	}
	addresses, err := of.Addresses(network.Node{
		Plan: m.Plan, Prefix: m.Prefix, Indexes: n.store, Cluster: gated{n.link, w, n},
	})
	if err != nil {
		return nil, err
	}
	if !tenant.NetworkHas(name, tenant.Mappings) {
		return map[string]agent.Network{name: countedNetwork{addresses, n.counted}}, nil
	}
	n.received = newMappedNetwork(addresses, m.Prefix, n.mapped, of.SimulatedEntries, func() { w.listed(n) },
		w.scenario.ActivePeers > 0)
	return map[string]agent.Network{name: n.received}, nil
}

// follow starts what runs until the agent ends. The manager of services runs only if there are services: it takes
// 10 KiB of each node.
func (n *node) follow(w *world) {
	ctx, stop := context.WithCancel(n.as(context.Background()))
	done, link, core := make(chan struct{}), n.link, n.core
	n.stop, n.done = stop, done
	go func() {
		defer close(done)
		var working sync.WaitGroup
		defer working.Wait()
		if w.scenario.Services > 0 {
			working.Go(func() { core.Run(ctx) })
		}
		link.Run(ctx, core)
	}()
}

// kill ends the agent's process without closing its store; disk and packet path remain.
func (n *node) kill() {
	if n.stop == nil {
		return
	}
	n.stop()
	<-n.done
	n.stop = nil
	n.forget()
}

func (n *node) forget() { n.who, n.link, n.core, n.store = nil, nil, nil, nil }

// fill creates the node's containers, for all tenants in turn.
func (n *node) fill(ctx context.Context, w *world) error {
	for len(n.running) < w.scenario.ContainersPerNode {
		if err := n.add(ctx, w, w.tenants[(n.number+n.made)%len(w.tenants)]); err != nil {
			return err
		}
	}
	return nil
}

// againAfter is the retry delay of a runtime.
const againAfter = time.Second

// add requests a container's endpoint from the agent, as a runtime does.
func (n *node) add(ctx context.Context, w *world, of string) error {
	id, began := n.containerID(), time.Now()
	for {
		_, err := n.core.Add(n.as(ctx), agent.AddRequest{
			ContainerID: id, Interface: containerInterface, Netns: w.netns, Tenant: of, Labels: w.labels,
			CNINetwork: "pilaster",
		})
		if err == nil {
			break
		}
		if !errors.Is(err, refusal.ErrUnavailable) || ctx.Err() != nil {
			return fmt.Errorf("node %s, container %d: %w", n.name, n.made, err)
		}
		w.retried.Add(1)
		if err := pause(ctx, againAfter); err != nil {
			return err
		}
	}
	w.adds.note(time.Since(began))
	n.running = append(n.running, container{id, of})
	return nil
}

// containerID returns a new ID, which is as long as the IDs of real runtimes.
func (n *node) containerID() string {
	n.made++
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%d", n.name, n.made))
	return hex.EncodeToString(sum[:])
}

// remove deletes the endpoint of the oldest container.
func (n *node) remove(ctx context.Context) error { return n.removeAt(ctx, 0) }

func (n *node) removeAt(ctx context.Context, i int) error {
	if err := n.core.Delete(n.as(ctx), n.running[i].id, containerInterface); err != nil {
		return fmt.Errorf("node %s: %w", n.name, err)
	}
	n.running = slices.Delete(n.running, i, i+1)
	return nil
}
