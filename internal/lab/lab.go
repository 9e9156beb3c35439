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

// Options say how to bring a lab up.
type Options struct {
	Root             string       // folder of all labs; DefaultRoot when empty
	Binary           string       // the pilaster binary; pilaster-cni lies beside it
	OrchestratorArgs []string     // more arguments for the orchestrator
	AgentArgs        []string     // more arguments for every agent
	Led              *Led         // by an orchestrator of the caller's; nil means that the lab starts its own
	Progress         func(string) // receives each step; may be nil
}

// Led says how a lab without regions is led by an orchestrator that runs elsewhere and outlives it.
type Led struct {
	Serve  func(net.Listener) // has it serve the lab's nodes, too
	Socket string             // its operator's
	Token  string             // file with its join token
}

// Lab is a lab that is up. Its methods may be called at the same time.
type Lab struct {
	folder  folder
	control control
	agents  sync.Map // by node: clients, each with a connection of its own

	mu    sync.Mutex
	state state
}

// state is what lab.json keeps, so that other processes can use the lab.
type state struct {
	Spec             Spec              `json:"spec"`
	Binary           string            `json:"binary"`
	OrchestratorArgs []string          `json:"orchestratorArgs,omitempty"`
	AgentArgs        []string          `json:"agentArgs,omitempty"`
	Nodes            []nodeState       `json:"nodes"`
	Containers       []ContainerStatus `json:"containers"`
}

type nodeState struct {
	Name   string       `json:"name"`
	Prefix netip.Prefix `json:"prefix"`
}

// Open finds a lab that is up.
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

// Name of the lab.
func (l *Lab) Name() string { return filepath.Base(string(l.folder)) }

// Ends are the names of containers and nodes.
func (l *Lab) Ends() (all []string) {
	for _, c := range l.Containers() {
		all = append(all, c.Name)
	}
	return append(all, l.state.Spec.AllNodes()...)
}

// Places are the names of all that commands run in: beside the ends, orchestrators and the fabric.
func (l *Lab) Places() []string {
	all := l.Ends()
	for _, r := range l.state.Spec.regions() {
		all = append(all, r.place())
	}
	return append(all, Router)
}

// Folder holds everything of the lab: log/ is what its daemons print.
func (l *Lab) Folder() string { return string(l.folder) }

// Namespace opens the namespace of a node, a container, Router or Orchestrator. Close it.
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

// Agent is the API of a node's agent.
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

// AgentSocket is where a node's agent serves.
func (l *Lab) AgentSocket(node string) string { return l.folder.agentSocket(node) }

// OVS is the folder of a node's Open vSwitch.
func (l *Lab) OVS(node string) string { return l.folder.nodeOVS(node) }

// Operator is the API for people of the orchestrator, of the first region's where there are any.
func (l *Lab) Operator() pilasterv1connect.OperatorServiceClient { return l.OperatorOf(l.first().Name) }

func (l *Lab) first() Region { return l.state.Spec.regions()[0] }

// OrchestratorURL is where agents reach that orchestrator; TokenFile what they join with.
func (l *Lab) OrchestratorURL() string { return "https://" + orchestratorListen(0) }
func (l *Lab) TokenFile() string       { return l.folder.token(l.first().Name) }

// BPF is the folder of a node's pins.
func (l *Lab) BPF(node string) string { return l.folder.nodeBPF(node) }

// Prefix is a node's /64.
func (l *Lab) Prefix(node string) (netip.Prefix, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.state.Nodes, func(n nodeState) bool { return n.Name == node })
	if i < 0 {
		return netip.Prefix{}, fmt.Errorf("lab %s has no node %q", l.Name(), node)
	}
	return l.state.Nodes[i].Prefix, nil
}

// Address is how others name a container or a node: a container's is the one that containers of
// its tenant see, a node's is the first of its prefix.
func (l *Lab) Address(name string) (netip.Addr, error) {
	if c, err := l.Container(name); err == nil {
		return c.Address, nil
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

// change alters the containers that all processes know by the state, one after another, and saves it where that makes a
// difference.
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

// save writes the state and the hosts files made of it. The locks are held, or no other process has the lab yet.
func (l *Lab) save() error {
	if err := writeJSON(l.folder.state(), l.state); err != nil {
		return fmt.Errorf("lab %s: %w", l.Name(), err)
	}
	nodes := localHost
	for _, n := range l.state.Nodes {
		nodes += n.Prefix.Addr().Next().String() + " " + n.Name + "\n"
	}
	hosts := map[string]string{nodeHosts: nodes}
	for _, t := range l.state.Spec.Tenants {
		hosts[t.Name] = l.hostsOf(t.Name)
	}
	for viewer, text := range hosts {
		// In place: running commands have this file mounted.
		if err := os.WriteFile(l.folder.hosts(viewer), []byte(text), 0o644); err != nil {
			return fmt.Errorf("lab %s: %w", l.Name(), err)
		}
	}
	return nil
}

const (
	localHost = "127.0.0.1 localhost\n::1 localhost\n"
	nodeHosts = "_nodes" // no tenant is called so
)

// hostsOf is what a tenant's containers have in /etc/hosts: their own kind, and others where that
// shows no plaintext address.
func (l *Lab) hostsOf(tenant string) string {
	hosts := localHost
	for _, c := range l.state.Containers {
		for _, a := range c.Attachments {
			if c.Tenant == tenant || a.hides() {
				hosts += a.Address.String() + " " + c.Name + "\n"
			}
		}
	}
	return hosts
}
