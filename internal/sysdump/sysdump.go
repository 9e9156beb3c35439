package sysdump

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/api/pilaster/v1/pilasterv1connect"
	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/preflight"
	"pilaster.io/pilaster/internal/unixrpc"
)

// Config has the paths of the daemons' files and sockets.
type Config struct {
	Version                         any // of this binary
	AgentSocket, OrchestratorSocket string
	StateDir, BPFFS                 string
	Uplinks                         []string // empty: the devices of the pinned programs
	Log                             string   // file with the agent's log; empty: the journal of its systemd unit
}

// Parts returns the parts of a node, in the order in which a reader needs them.
func Parts(c Config) []Part {
	if len(c.Uplinks) == 0 {
		c.Uplinks = pinnedUplinks(c.BPFFS)
	}
	return slices.Concat(c.machine(), c.agent(), c.datapath(), c.network(), c.orchestrator())
}

func (c Config) machine() []Part {
	return []Part{
		object("version.json", func(context.Context) (any, error) { return c.Version, nil }),
		command("machine/uname.txt", "uname", "-a"),
		tail("machine/os-release.txt", "/etc/os-release"),
		tail("machine/meminfo.txt", "/proc/meminfo"),
		tail("machine/loadavg.txt", "/proc/loadavg"),
		tail("machine/mounts.txt", "/proc/self/mountinfo"),
		object("machine/cpus.json", func(context.Context) (int, error) { return runtime.NumCPU(), nil }),
		object("preflight.json", func(ctx context.Context) ([]preflight.Result, error) {
			if len(c.Uplinks) == 0 {
				return nil, errors.New("the uplink is unknown, because no program is pinned; set it with --uplink")
			}
			config := preflight.Config{Uplinks: c.Uplinks, Plan: address.DefaultPlan(), BPFFS: c.BPFFS}
			if m, joined := state.Peek(c.StateDir); joined {
				config.Plan, config.NodePrefix = m.Plan, m.Prefix
			}
			return preflight.Run(ctx, config), nil
		}),
	}
}

func (c Config) agent() []Part {
	client := pilasterv1connect.NewAgentServiceClient(unixrpc.Client(c.AgentSocket), unixrpc.URL, connect.WithGRPC())
	log := tail("agent/log.txt", c.Log)
	if c.Log == "" {
		log = command(
			"agent/log.txt",
			"journalctl",
			"--unit",
			"pilaster-agent",
			"--lines",
			"5000",
			"--output",
			"short-iso-precise",
			"--no-pager",
		)
	}
	return []Part{
		answer("agent/status.json", client.Status),
		answer("agent/endpoints.json", client.ListEndpoints),
		answer("agent/drops.json", client.RecentEvents),
		page("agent/metrics.txt", c.AgentSocket, "/metrics"),
		page("agent/goroutines.txt", c.AgentSocket, "/debug/goroutines"),
		log,
		object(
			"agent/state.json",
			func(context.Context) (agent.DiskState, error) { return agent.ReadDiskState(c.StateDir) },
		),
		object(
			"agent/certificates.json",
			func(context.Context) ([]join.Certificate, error) { return join.Describe(c.StateDir) },
		),
	}
}

func (c Config) datapath() []Part {
	return []Part{
		object(
			"datapath/tables.json",
			func(context.Context) (datapath.Tables, error) { return datapath.DumpTables(c.BPFFS) },
		),
		object(
			"datapath/pins.json",
			func(context.Context) ([]datapath.Pin, error) { return datapath.DumpPins(c.BPFFS) },
		),
		object("datapath/hooks.json", func(context.Context) ([]datapath.Hook, error) { return datapath.DumpHooks() }),
	}
}

func (c Config) network() []Part {
	devices := append([]string{"all", "default"}, c.Uplinks...)
	return []Part{
		command("network/links.txt", "ip", "-d", "-s", "link"),
		command("network/addresses.txt", "ip", "addr"),
		command("network/routes.txt", "ip", "-6", "route", "show", "table", "all"),
		command("network/rules.txt", "ip", "-6", "rule"),
		command("network/neighbours.txt", "ip", "-6", "neigh"),
		command("network/qdiscs.txt", "tc", "-s", "qdisc"),
		object(
			"network/sysctls.json",
			func(context.Context) (map[string]string, error) { return datapath.DumpSysctls(devices...) },
		),
	}
}

// tenantInfo is a tenant without keys.
type tenantInfo struct {
	Name       string   `json:"name"`
	Addressing string   `json:"addressing"`
	IDs        []uint32 `json:"ids"`
	Created    string   `json:"created"`
}

func (c Config) orchestrator() []Part {
	client := pilasterv1connect.NewOperatorServiceClient(
		unixrpc.Client(c.OrchestratorSocket),
		unixrpc.URL,
		connect.WithGRPC(),
	)
	return []Part{
		answer("orchestrator/cluster.json", client.ClusterStatus),
		answer("orchestrator/nodes.json", client.ListNodes),
		object("orchestrator/tenants.json", func(ctx context.Context) ([]tenantInfo, error) {
			resp, err := client.ListTenants(ctx, connect.NewRequest(&pilasterv1.ListTenantsRequest{}))
			if err != nil {
				return nil, err
			}
			all := []tenantInfo{}
			for _, t := range resp.Msg.Tenants {
				info := tenantInfo{
					Name:       t.Name,
					Addressing: t.Addressing.String(),
					Created:    t.Created.AsTime().String(),
				}
				for _, id := range t.Ids {
					info.IDs = append(info.IDs, id.Id)
				}
				all = append(all, info)
			}
			return all, nil
		}),
		answer("orchestrator/policies.json", client.ListPolicies),
		page("orchestrator/metrics.txt", c.OrchestratorSocket, "/metrics"),
		page("orchestrator/goroutines.txt", c.OrchestratorSocket, "/debug/goroutines"),
	}
}

// pinnedUplinks returns the devices of the pinned links; none without pins.
func pinnedUplinks(bpffs string) (all []string) {
	pins, _ := datapath.DumpPins(bpffs) // the part of the pins reports the error
	for _, p := range pins {
		if !p.OnUplink() {
			continue
		}
		device, err := net.InterfaceByIndex(int(p.Ifindex))
		if err == nil && !slices.Contains(all, device.Name) {
			all = append(all, device.Name)
		}
	}
	return all
}

// Create creates the file of an archive. It returns an error if the file exists.
func Create(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("%s exists already\n  nothing was written; use another file name", path)
	}
	return f, err
}
