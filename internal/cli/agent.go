package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/agent/daemon"
	"pilaster.io/pilaster/internal/agent/hostnet"
	"pilaster.io/pilaster/internal/agent/state"
	"pilaster.io/pilaster/internal/choice"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/datapath/device"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/modules/module"
	"pilaster.io/pilaster/internal/tenant"
)

// gcPercent is the agent's GOGC, in percent of the live heap. The agent is idle most of the time, so frequent garbage
// collections cost little, and the heap stays small.
const gcPercent = 25

// Values of --dscp.
const (
	dscpKeep  = "keep"
	dscpClear = "clear"
)

func newAgentCommand(env Env) *cobra.Command {
	var o daemon.Options
	networks := newNetworkFlags()
	var tokenFile, nodePrefix, bpffs, cgroup, dev, dscp string
	var maxRules, maxSessions int
	var steer agentSteering
	c := &cobra.Command{
		Use:   "agent",
		Short: "Run this node's agent",
		Long: `Run this node's agent. The agent manages the endpoints of this node and serves the CNI plugin and the
command line on <run-dir>/agent.sock. Packets are forwarded without the agent, even after it was killed,
as long as the bpffs with the pinned eBPF objects stays mounted. In a mount namespace of its own ("ip
netns exec", a container) the agent must find the bpffs of the machine. It refuses to start without it,
because a bpffs that it mounted there would disappear with the namespace.`,
		Example: `  pilaster agent --orchestrator https://[2001:db8::1]:7070 --token-file /etc/pilaster/join-token --uplink eth0`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return usage("pilaster agent needs root: it creates devices and loads eBPF programs")
			}
			o.Version = programVersion()
			o.Log = slog.New(slog.NewTextHandler(env.Stderr, nil))
			if err := datapath.CheckUplinkNames(o.Uplinks, dev); err != nil {
				return usage("%w", err)
			}
			if err := networks.check(settings(o, dev)); err != nil {
				return err
			}
			if maxRules < 1 || maxRules > datapath.MaxMaxRules || maxSessions < 1 ||
				maxSessions > datapath.MaxMaxSessions {
				return usage(
					"--max-rules %d, --max-sessions %d: choose 1 to %d for --max-rules, 1 to %d for --max-sessions",
					maxRules,
					maxSessions,
					datapath.MaxMaxRules,
					datapath.MaxMaxSessions,
				)
			}
			if err := cmp.Or(steer.complete(&o), completeAgent(&o, tokenFile, nodePrefix)); err != nil {
				return err
			}
			config := datapath.Config{
				Uplinks: o.Uplinks, BPFFS: bpffs, MaxEndpoints: o.MaxEndpoints, MaxTenantIDs: o.MaxTenantIDs,
				MTUReserve: o.MTUReserve, ClearDSCP: dscp == dscpClear,
				MaxRules: maxRules, MaxSessions: maxSessions, Device: dev,
				Log: o.Log,
			}
			root, err := cgroupOf(cgroup, o.RunDir)
			if err != nil {
				return err
			}
			config.CgroupRoot, config.CgroupOptional = root, cgroup == cgroupAuto
			networks.configure(&config)
			// Before the node joins: if the start failed later, the node's name and prefix would stay allocated.
			if err := cmp.Or(host.CheckBPFFS(bpffs), datapath.CheckUplink(config),
				networks.ready(c.Context())); err != nil {
				return err
			}
			var path *datapath.Datapath
			uses := config.Plan.Identifiers
			o.OpenDriver = func(m state.Membership) (_ daemon.DriverCloser, err error) {
				config.Cluster, config.NodePrefix, config.Plan = m.ClusterUUID, m.Prefix, m.Plan
				if err := reserve(&config, uses); err != nil {
					return nil, err
				}
				path, err = datapath.Open(config)
				return path, err
			}
			o.Networks = networks.factories(c.Context(), func() module.Host {
				return module.Host{Settings: settings(o, dev), Path: path, Log: o.Log}
			})
			debug.SetGCPercent(gcPercent)
			o.Identifiers = uses
			err = daemon.Run(c.Context(), o)
			for errors.Is(err, daemon.ErrReserved) && c.Context().Err() == nil {
				o.Log.Info("the agent starts again to protect a prefix; packets flow meanwhile", "reason", err)
				err = daemon.Run(c.Context(), o)
			}
			return err
		},
	}
	f := c.Flags()
	f.IntVar(
		&maxRules,
		"max-rules",
		datapath.DefaultMaxRules,
		"maximum entries of each policy table; 160 bytes each are allocated at the start, more as entries are added",
	)
	f.IntVar(
		&maxSessions,
		"max-sessions",
		datapath.DefaultMaxSessions,
		"maximum tracked sessions (conntrack entries) of containers with policies, 73 bytes each, allocated at the "+
			"start; rounded up to 7 times a power of 2",
	)
	f.StringVar(&o.OrchestratorURL, "orchestrator", "", "URL of the orchestrator, https://host:port")
	f.StringVar(&tokenFile, "token-file", "", "file with the join token; not needed after the node has joined")
	bindUplinks(c, &o.Uplinks)
	f.StringVar(&o.NodeName, "node-name", "", "name of this node (default: the host name)")
	f.StringVar(
		&nodePrefix,
		"node-prefix",
		"",
		"the /64 that the fabric routes to this node (default: the orchestrator allocates one)",
	)
	f.StringVar(
		&o.RunDir,
		"run-dir",
		"/run/pilaster",
		"folder of the agent's socket; must be on tmpfs",
	)
	f.StringVar(&o.StateDir, "state-dir", "/var/lib/pilaster",
		"folder where the agent stores endpoints, keys and the node's identity")
	f.StringVar(&bpffs, "bpffs", "/sys/fs/bpf/pilaster",
		"bpffs folder where the eBPF programs and maps are pinned; mounted when missing")
	f.StringVar(&cgroup, "cgroup-root", cgroupAuto, "folder of the cgroup (version 2) of this node's processes "+
		"and containers: their sockets get a backend when they connect to a service; "+cgroupAuto+": where cgroup2 is "+
		"mounted, "+cgroupNone+": the node translates packets of containers to services instead, and its own "+
		"processes reach no services")
	f.IntVar(&o.MaxEndpoints, "max-endpoints", dpapi.DefaultMaxEndpoints, "maximum endpoints on this node, 1 to 65535")
	f.IntVar(
		&o.MaxTenantIDs,
		"max-tenant-ids",
		dpapi.DefaultMaxTenantIDs,
		"maximum tenant ids on this node, 1 to 65535; a tenant has one, and one more after each key rotation",
	)
	f.IntVar(
		&o.MTUReserve,
		"mtu-reserve",
		0,
		fmt.Sprintf(
			"bytes by which the containers' MTU is smaller than the uplink's; offloads need %d on every node that "+
				"hosts the tenant",
			tenant.OffloadOverhead,
		),
	)
	f.StringVar(
		&o.Rack,
		"rack",
		"",
		"rack of this node, a DNS label: frontends of offloads are nodes of the same rack first",
	)
	f.StringVar(
		&o.Zone,
		"zone",
		"",
		"zone of this node, a DNS label, for services with the distribution PreferSameZone (default: the rack)",
	)
	f.Float64Var(
		&o.PacketCPUs,
		"packet-cpus",
		0,
		"CPUs of this node for packets, such as 1.5: offloads start and end by the part of them that is in use "+
			"(default: all CPUs)",
	)
	choice.Bind(c, &dscp, "dscp", "DSCP of containers' packets to the fabric, network "+tenant.DefaultNetwork+
		": keep, or clear (to 0, for a fabric that gives priority by DSCP)", []string{dscpKeep, dscpClear})
	bindDevice(c, &dev)
	steer.bind(c)
	networks.bind(c)
	f.BoolVar(
		&o.Edge,
		"edge",
		false,
		"run as the Edge Switch of this region, through which tenants on network "+
			tenant.NetworksWith(tenant.Regions)+" reach other regions; it hosts no containers",
	)
	f.StringVar(
		&o.MetricsListen,
		"metrics-listen",
		"",
		"host:port for /metrics, /healthz and /readyz (default: on the socket only)",
	)
	_ = c.MarkFlagRequired("orchestrator")
	_ = c.MarkFlagRequired("uplink")
	return c
}

// Values of --cgroup-root that are no folder.
const (
	cgroupAuto = "auto"
	cgroupNone = "none"
)

// cgroupOf returns the folder that a value of --cgroup-root means; "" for none.
func cgroupOf(value, runDir string) (string, error) {
	switch value {
	case cgroupNone:
		return "", nil
	case cgroupAuto:
		return host.FindCgroup(filepath.Join(runDir, "cgroup"))
	}
	return value, host.CheckCgroup(value)
}

// reserve makes the data path reserve the prefix of identifiers, if the cluster or this node uses it. On a node without
// a network that uses it, an overlap is only logged: a tenant elsewhere must not stop the node.
func reserve(c *datapath.Config, uses bool) error {
	c.Plan.Identifiers = c.Plan.Identifiers || uses
	reserved := c.Plan.ReservedPrefix()
	if !reserved.IsValid() {
		return nil
	}
	err := hostnet.CheckReserved(reserved, c.Uplinks)
	if err != nil && !uses {
		c.Log.Error("the cluster reserves a prefix of which this node has a part; this node does not reserve it: its "+
			"other interfaces can send with the addresses of containers", "error", err)
		c.Plan.Identifiers, err = false, nil
	}
	return err
}

// bindUplinks adds the flag that names the uplinks.
func bindUplinks(c *cobra.Command, uplinks *[]string) {
	c.Flags().StringSliceVar(uplinks, "uplink", nil, fmt.Sprintf(
		"device to the fabric; up to %d times if the routes of this node lead by several, the one to other nodes first",
		datapath.MaxUplinks))
	_ = c.RegisterFlagCompletionFunc("uplink", deviceNames("", ""))
}

// bindDevice adds the flag that selects the kind of device of new containers.
func bindDevice(c *cobra.Command, dev *string) {
	choice.Bind(
		c,
		dev,
		"device",
		"how containers are connected to the node: veth; netkit, which is faster, if the kernel supports it; auto, "+
			"the better of these two; or macvlan, only for containers without CAP_NET_ADMIN",
		device.DeviceChoices(),
	)
}

func settings(o daemon.Options, dev string) module.Settings {
	return module.Settings{Device: dev, Uplinks: o.Uplinks, RunDir: o.RunDir, Edge: o.Edge}
}

// completeAgent checks the options and reads the values that flags only refer to: host name, prefix and token file.
func completeAgent(o *daemon.Options, tokenFile, nodePrefix string) error {
	if u, err := url.Parse(o.OrchestratorURL); err != nil || u.Scheme != "https" || u.Host == "" {
		return usage("--orchestrator %q is not of the form https://host:port", o.OrchestratorURL)
	}
	if o.MaxEndpoints < 1 || o.MaxEndpoints > 65535 {
		return usage("--max-endpoints %d: choose 1 to 65535", o.MaxEndpoints)
	}
	if o.MaxTenantIDs < 1 || o.MaxTenantIDs > 65535 {
		return usage("--max-tenant-ids %d: choose 1 to 65535", o.MaxTenantIDs)
	}
	if o.MTUReserve < 0 {
		return usage("--mtu-reserve %d is negative", o.MTUReserve)
	}
	if all := float64(runtime.NumCPU()); !(o.PacketCPUs >= 0 && o.PacketCPUs <= all) {
		return usage("--packet-cpus %g: choose 0 (all CPUs) to %g, the number of CPUs", o.PacketCPUs, all)
	}
	if o.Rack != "" {
		if err := tenant.CheckRackName(o.Rack); err != nil {
			return usage("--rack: %w", err)
		}
	}
	if o.Zone != "" {
		if err := tenant.CheckZoneName(o.Zone); err != nil {
			return usage("--zone: %w", err)
		}
	}
	if o.NodeName == "" {
		name, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("cannot read the host's name: %w\n  set a name with --node-name", err)
		}
		o.NodeName = strings.ToLower(name)
	}
	if nodePrefix != "" {
		p, err := parseNodePrefix(nodePrefix)
		if err != nil {
			return err
		}
		o.NodePrefix = p
	}
	if tokenFile != "" {
		b, err := os.ReadFile(tokenFile)
		if err != nil &&
			!(errors.Is(err, fs.ErrNotExist) && join.Joined(o.StateDir)) { // a node that has joined needs no token
			return fmt.Errorf(
				"--token-file: %w\n  nothing was changed; copy the orchestrator's join-token file there: this node "+
					"has no certificate yet",
				err,
			)
		}
		o.Token = string(b)
	}
	return nil
}

func parseNodePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil || p.Bits() != address.NodeBits || p != p.Masked() {
		return p, usage("--node-prefix %q is not of the form fd70:696c:6100:1::/64", s)
	}
	return p, nil
}
