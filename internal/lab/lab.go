package lab

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Options configure Up.
type Options struct {
	Root             string                // folder of all labs; empty means DefaultRoot
	Binary           string                // path of the pilaster binary; pilaster-cni must be in the same folder
	OrchestratorArgs []string              // additional arguments of the orchestrator
	AgentArgs        []string              // additional arguments of every agent
	External         *ExternalOrchestrator // orchestrator outside the lab; nil means that the lab starts its own
	WithoutCgroups   bool                  // the agents are of a build without --cgroup-root
	Progress         func(string)          // called at each step; may be nil
}

// ExternalOrchestrator is an orchestrator that runs outside a lab without regions and outlives the lab.
type ExternalOrchestrator struct {
	Serve  func(net.Listener) // makes the orchestrator serve the lab's nodes on this listener too
	Socket string             // path of its operator socket
	Token  string             // path of the file with its join token
}

// Lab is a lab that is up. Its methods are safe for concurrent use.
type Lab struct {
	folder  folder
	control control
	agents  sync.Map // clients by node, each with its own connection

	mu    sync.Mutex
	state state
}

// state is the content of lab.json, from which other processes open the lab.
type state struct {
	Spec             Spec              `json:"spec"`
	Binary           string            `json:"binary"`
	OrchestratorArgs []string          `json:"orchestratorArgs,omitempty"`
	AgentArgs        []string          `json:"agentArgs,omitempty"`
	WithoutCgroups   bool              `json:"withoutCgroups,omitempty"`
	Nodes            []nodeState       `json:"nodes"`
	Containers       []ContainerStatus `json:"containers"`
}

type nodeState struct {
	Name   string       `json:"name"`
	Prefix netip.Prefix `json:"prefix"`
}

// Open opens a lab that is up.
func Open(root, name string) (*Lab, error) {
	f := folder(filepath.Join(cmp.Or(root, DefaultRoot), name))
	l := newLab(f)
	var err error
	if l.state, err = f.read(); err != nil {
		return nil, err
	}
	return l, nil
}

func (f folder) read() (s state, err error) {
	name := filepath.Base(string(f))
	b, err := os.ReadFile(f.state())
	if err != nil {
		return s, fmt.Errorf("lab %s: %w; if it was left behind by a crash: pilaster lab down %s", name, err, name)
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("lab %s: %s: %w", name, f.state(), err)
	}
	return s, nil
}

func newLab(f folder) *Lab { return &Lab{folder: f, control: newControl(f)} }

// Name returns the lab's name.
func (l *Lab) Name() string { return filepath.Base(string(l.folder)) }

// ContainerNames returns the names of the containers.
func (l *Lab) ContainerNames() (all []string) {
	for _, c := range l.Containers() {
		all = append(all, c.Name)
	}
	return all
}

// NodeNames returns the names of all nodes.
func (l *Lab) NodeNames() []string { return l.state.Spec.AllNodes() }

// PingTargets returns the names of containers, nodes and hosts outside.
func (l *Lab) PingTargets() []string {
	return slices.Concat(l.ContainerNames(), l.state.Spec.AllNodes(), l.OutsideNames())
}

// ExecTargets returns the names of all places for commands: containers, nodes, orchestrators, the router and hosts
// outside.
func (l *Lab) ExecTargets() []string {
	all := append(l.ContainerNames(), l.state.Spec.AllNodes()...)
	for _, r := range l.state.Spec.regions() {
		all = append(all, r.place())
	}
	return append(append(all, Router), l.OutsideNames()...)
}

// Folder returns the lab's folder; log/ has the output of its daemons.
func (l *Lab) Folder() string { return string(l.folder) }

// Namespace opens the namespace of a node, a container, Router or Orchestrator. The caller must close it.
func (l *Lab) Namespace(name string) (*netns.Namespace, error) {
	ns, err := netns.Open(l.folder.netns(name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf(
			"lab %s has no node or container %q; pilaster lab status lists them",
			l.Name(),
			name,
		)
	}
	return ns, err
}

// Agent returns a client of a node's agent.
func (l *Lab) Agent(node string) pilasterv1connect.AgentServiceClient {
	client, known := l.agents.Load(node)
	if !known {
		client, _ = l.agents.LoadOrStore(
			node,
			pilasterv1connect.NewAgentServiceClient(
				unixrpc.Client(l.AgentSocket(node)),
				unixrpc.URL,
				connect.WithGRPC(),
			),
		)
	}
	return client.(pilasterv1connect.AgentServiceClient)
}

// AgentSocket returns the path of a node's agent socket.
func (l *Lab) AgentSocket(node string) string { return l.folder.agentSocket(node) }

// OVS returns the folder of a node's Open vSwitch.
func (l *Lab) OVS(node string) string { return l.folder.nodeOVS(node) }

// Operator returns a client of the orchestrator's operator API. If the lab has regions, it is the orchestrator of the
// first region.
func (l *Lab) Operator() pilasterv1connect.OperatorServiceClient { return l.OperatorOf(l.first().Name) }

func (l *Lab) first() Region { return l.state.Spec.regions()[0] }

// OrchestratorURL returns the URL at which agents connect to the same orchestrator as Operator. TokenFile returns the
// path of this orchestrator's join token.
func (l *Lab) OrchestratorURL() string { return "https://" + orchestratorListen(0) }
func (l *Lab) TokenFile() string       { return l.folder.token(l.first().Name) }

// BPF returns the folder of a node's pins.
func (l *Lab) BPF(node string) string { return l.folder.nodeBPF(node) }

// Prefix returns a node's prefix, a /64.
func (l *Lab) Prefix(node string) (netip.Prefix, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.state.Nodes, func(n nodeState) bool { return n.Name == node })
	if i < 0 {
		return netip.Prefix{}, fmt.Errorf("lab %s has no node %q", l.Name(), node)
	}
	return l.state.Nodes[i].Prefix, nil
}

// Address returns the address that containers of a container's tenant see, the first address of a node's prefix, or the
// address of a host outside.
func (l *Lab) Address(name string) (netip.Addr, error) {
	if c, err := l.Container(name); err == nil {
		return c.Address, nil
	}
	if a, is := l.state.Spec.outsideHost(name); is {
		return a, nil
	}
	p, err := l.Prefix(name)
	if err != nil {
		return netip.Addr{}, fmt.Errorf(
			"lab %s has no node or container %q; pilaster lab status lists them",
			l.Name(),
			name,
		)
	}
	return p.Addr().Next(), nil
}

// change applies alter to the containers in lab.json, and saves the result if it differs. A lock on the lab's folder
// serializes the changes of all processes.
func (l *Lab) change(alter func([]ContainerStatus) ([]ContainerStatus, error)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	turn, err := os.Open(l.Folder())
	if err != nil {
		return fmt.Errorf("lab %s: %w", l.Name(), err)
	}
	defer turn.Close()
	if err := unix.Flock(int(turn.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lab %s: lock %s: %w", l.Name(), l.Folder(), err)
	}
	written, err := l.folder.read()
	if err != nil {
		return err
	}
	containers, err := alter(slices.Clone(written.Containers))
	if err != nil {
		return err
	}
	l.state.Containers = containers
	if reflect.DeepEqual(containers, written.Containers) {
		return nil
	}
	return l.save()
}

// save writes the state and the hosts files derived from it. The caller holds the locks, or is the only process that
// uses the lab.
func (l *Lab) save() error {
	if err := writeJSON(l.folder.state(), l.state); err != nil {
		return fmt.Errorf("lab %s: %w", l.Name(), err)
	}
	outside := ""
	for _, h := range l.state.Spec.outsideHosts() {
		outside += h.Address.String() + " " + h.Name + "\n"
	}
	nodes := localHost + outside
	for _, n := range l.state.Nodes {
		nodes += n.Prefix.Addr().Next().String() + " " + n.Name + "\n"
	}
	hosts := map[string]string{nodeHosts: nodes}
	for _, t := range l.state.Spec.Tenants {
		hosts[t.Name] = l.hostsOf(t.Name) + outside
	}
	for viewer, text := range hosts {
		// Write in place: running commands have this file mounted, and would not see a new file.
		if err := os.WriteFile(l.folder.hosts(viewer), []byte(text), 0o644); err != nil {
			return fmt.Errorf("lab %s: %w", l.Name(), err)
		}
	}
	return nil
}

const (
	localHost = "127.0.0.1 localhost\n::1 localhost\n"
	nodeHosts = "_nodes" // not a valid name of a tenant
)

// hostsOf returns the /etc/hosts of a tenant's containers. It lists only that tenant's containers, because containers
// of other tenants, encrypted or clear, are never reachable.
func (l *Lab) hostsOf(tenant string) string {
	hosts := localHost
	for _, c := range l.state.Containers {
		if c.Tenant != tenant {
			continue
		}
		for _, a := range c.Attachments {
			hosts += a.Address.String() + " " + c.Name + "\n"
		}
	}
	return hosts
}
