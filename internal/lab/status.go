package lab

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// Status is the output of `lab status`.
type Status struct {
	Name         string             `json:"name"`
	Nodes        []NodeStatus       `json:"nodes"`
	Containers   []ContainerOutput  `json:"containers"`
	Orchestrator OrchestratorStatus `json:"orchestrator"` // of the first region, if there are regions
	Regions      []RegionStatus     `json:"regions,omitempty"`
	Outside      []OutsideStatus    `json:"outside,omitempty"`
	Supervisor   int                `json:"supervisorPid"` // 0 if it does not run; then the other pids are unknown
}

// NodeStatus is the status of a node. A pid is 0 if the process does not run, or if the supervisor does not run.
type NodeStatus struct {
	Name          string       `json:"name"`
	Prefix        netip.Prefix `json:"prefix"`
	Netns         string       `json:"netns"`
	AgentPID      int          `json:"agentPid"`
	AgentSocket   string       `json:"agentSocket"`
	AgentRestarts int          `json:"agentRestarts"`
	Region        string       `json:"region,omitempty"`
	Edge          bool         `json:"edge,omitempty"` // the Edge Switch of its region
	Silent        bool         `json:"silent"`         // its agent does not respond: the containers have their last known addresses
}

// OutsideStatus is a host outside of the cluster.
type OutsideStatus struct {
	Name    string     `json:"name"`
	Address netip.Addr `json:"address"`
	Netns   string     `json:"netns"`
}

// RegionStatus is a region and its orchestrator.
type RegionStatus struct {
	Name         string             `json:"name"`
	BasePrefix   netip.Prefix       `json:"basePrefix"`
	Netns        string             `json:"netns"` // of the orchestrator
	Orchestrator OrchestratorStatus `json:"orchestrator"`
}

// ContainerOutput is a container. Ciphertext is empty if the tenant is clear; both addresses are empty on a network
// with own CIDRs.
type ContainerOutput struct {
	Name        string       `json:"name"`
	Node        string       `json:"node"`
	Tenant      string       `json:"tenant"`
	App         uint32       `json:"app"`
	Addresses   []netip.Addr `json:"addresses"` // as the container sees them
	Attachments []Attachment `json:"attachments"`
	Plaintext   string       `json:"plaintext"`
	Ciphertext  string       `json:"ciphertext"`
	Netns       string       `json:"netns"`
	PID         int          `json:"pid"`
}

// OrchestratorStatus is the orchestrator.
type OrchestratorStatus struct {
	PID    int    `json:"pid"`
	Listen string `json:"listen"`
	Socket string `json:"socket"`
}

// Status combines the supervisor's processes, the agents' containers and the lab's state.
func (l *Lab) Status(ctx context.Context) (Status, error) {
	supervisor, err := supervisorPID(l.folder)
	if err != nil {
		return Status{}, err
	}
	processes := map[string]ProcessState{}
	if supervisor != 0 {
		states, err := l.Processes(ctx)
		if err != nil {
			return Status{}, err
		}
		for _, p := range states {
			processes[p.Name] = p
		}
	}
	silent, err := l.Refresh(ctx)
	if err != nil {
		return Status{}, err
	}
	s := Status{
		Name: l.Name(), Nodes: []NodeStatus{}, Containers: []ContainerOutput{}, Supervisor: supervisor,
	}
	for i, r := range l.state.Spec.regions() {
		o := OrchestratorStatus{processes[r.place()].PID, orchestratorListen(i), l.folder.orchestratorSocket(r.Name)}
		if i == 0 {
			s.Orchestrator = o
		}
		if r.Name != "" {
			s.Regions = append(s.Regions, RegionStatus{r.Name, r.BasePrefix, l.folder.netns(r.place()), o})
		}
	}
	for _, h := range l.state.Spec.outsideHosts() {
		s.Outside = append(s.Outside, OutsideStatus{h.Name, h.Address, l.folder.netns(h.Name)})
	}
	for _, name := range l.state.Spec.AllNodes() {
		prefix, err := l.Prefix(name)
		if err != nil {
			return Status{}, err
		}
		agent := processes[AgentProcess(name)]
		region, _ := l.state.Spec.RegionOf(name)
		s.Nodes = append(
			s.Nodes,
			NodeStatus{
				name,
				prefix,
				l.folder.netns(name),
				agent.PID,
				l.AgentSocket(name),
				agent.Restarts,
				region.Name,
				region.Edge == name,
				slices.Contains(silent, name),
			},
		)
	}
	for _, c := range l.Containers() {
		out := ContainerOutput{
			Name: c.Name, Node: c.Node, Tenant: c.Tenant, App: c.App, Addresses: c.Addresses(),
			Attachments: c.Attachments,
			Netns:       l.folder.netns(c.Name), PID: processes[containerProcess(c.Name)].PID,
		}
		if c.Plaintext.IsValid() {
			out.Plaintext = c.Plaintext.String()
		}
		if i := slices.IndexFunc(c.Attachments, Attachment.isOpaque); i >= 0 {
			out.Ciphertext = c.Attachments[i].Address.String()
		}
		s.Containers = append(s.Containers, out)
	}
	return s, nil
}

// Drops reads a node's drop counters by reason, including those that are 0.
func (l *Lab) Drops(ctx context.Context, node string) (map[string]uint64, error) {
	response, err := l.Agent(node).Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
	if err != nil {
		return nil, fmt.Errorf("drops of %s: %w", node, err)
	}
	drops := map[string]uint64{}
	for _, d := range response.Msg.Drops {
		drops[d.Reason] = d.Packets
	}
	return drops, nil
}
