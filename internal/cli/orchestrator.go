package cli

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/orchestrator"
	"pilaster.io/pilaster/internal/orchestrator/admission"
	"pilaster.io/pilaster/internal/orchestrator/announce"
	"pilaster.io/pilaster/internal/orchestrator/evpnroutes"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

const defaultDataDir = "/var/lib/pilaster/orchestrator"

func newOrchestratorCommand(env Env) *cobra.Command {
	var c orchestrator.Config
	var etcd, base, private, egress string
	var gateways []string
	var evpn evpnroutes.Flags
	var services announce.Flags
	plan := address.DefaultPlan()
	cmd := &cobra.Command{
		Use:   "orchestrator",
		Short: "Allocate node prefixes, tenant ids, keys and apps, and distribute them to the agents",
		Long: `Allocate node prefixes, tenant ids, keys and apps, and send each agent the state that it needs.

The store is an etcd inside this process, or an external one with --etcd, which several orchestrators
can share. Nodes join with the token in <data-dir>/join-token, which "pilaster orchestrator token
rotate" replaces.`,
		Example: `  pilaster orchestrator --data-dir /var/lib/pilaster/orchestrator --listen [::]:7070
  pilaster orchestrator --etcd https://a:2379,https://b:2379 --etcd-ca ca.pem --etcd-cert me.pem --etcd-key me.key`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if c.Plan.Base, err = prefixFlag("--base-prefix", base); err != nil {
				return err
			}
			if c.Plan.Private, err = prefixFlag("--private-prefix", private); err != nil {
				return err
			}
			if c.Plan.Egress, err = prefixFlag("--egress-prefix", egress); err != nil {
				return err
			}
			if err = gatewayFlag(gateways, &c.Plan); err != nil {
				return err
			}
			if c.Etcd.Endpoints = store.SplitEndpoints(etcd); len(c.Etcd.Endpoints) == 0 &&
				(c.Etcd.CA != "" || c.Etcd.Cert != "" || c.Etcd.Key != "") {
				return usage("--etcd-ca, --etcd-cert and --etcd-key need --etcd")
			}
			if c.Region != "" {
				if err := tenant.CheckRegionName(c.Region); err != nil {
					return usage("--region: %w", err)
				}
			}
			if (c.Etcd.Cert == "") != (c.Etcd.Key == "") {
				return usage("--etcd-cert and --etcd-key: set both or none")
			}
			if min(c.Limits.Connections, c.Limits.Strangers, c.Limits.Joins) < 1 {
				return usage("--max-connections, --max-strangers and --max-joins must be at least 1")
			}
			if c.Limits.Lists < 0 {
				return usage("--list-rate must be at least 0 (0: no limit)")
			}
			if c.EVPN, err = evpn.Config(); err != nil {
				return usage("%w", err)
			}
			if c.BGP, err = services.Config(); err != nil {
				return usage("%w", err)
			}
			if err = orchestrator.CheckPeers(c); err != nil {
				return usage("%w", err)
			}
			c.Version = programVersion()
			c.Log = slog.New(slog.NewTextHandler(env.Stderr, nil))
			err = orchestrator.Run(cmd.Context(), c)
			if refused := new(store.Error); errors.As(err, &refused) && refused.Reason == store.Invalid {
				return &exitError{ExitUsage, err}
			}
			return err
		},
	}
	cmd.AddCommand(newOrchestratorBackup(env), newOrchestratorRestore(env), newOrchestratorToken(env))
	f := cmd.Flags()
	f.StringVar(&c.DataDir, "data-dir", defaultDataDir, "folder of the join token and the embedded etcd")
	f.StringVar(&c.RunDir, "run-dir", "/run/pilaster", "folder of the operator's socket orchestrator.sock")
	f.StringVar(&c.Region, "region", "", "name of this region (see pilaster region)")
	f.StringVar(&c.Listen, "listen", "[::]:7070", "address for nodes, with TLS; also /healthz and /readyz")
	f.StringSliceVar(&c.Advertise, "advertise", nil, "additional host names and addresses for the TLS certificate")
	f.StringVar(
		&c.MetricsListen,
		"metrics-listen",
		"",
		"address for Prometheus metrics, without TLS (they are always on the operator's socket too)",
	)
	c.Limits = admission.DefaultLimits
	f.IntVar(
		&c.Limits.Connections,
		"max-connections",
		c.Limits.Connections,
		"maximum connections in total; a node needs one, and two while its certificate is renewed",
	)
	f.IntVar(
		&c.Limits.Strangers,
		"max-strangers",
		c.Limits.Strangers,
		"maximum connections without a node certificate from one source (IPv4 address, IPv6 /64)",
	)
	f.IntVar(
		&c.Limits.Joins,
		"max-joins",
		c.Limits.Joins,
		"join attempts a second from one source; the burst is ten times that",
	)
	f.IntVar(
		&c.Limits.Lists,
		"list-rate",
		0,
		"queries a second, of all nodes together, for the locations of a tenant's subnets or containers on network "+
			tenant.NetworksWith(tenant.Mappings)+
			", 500 locations a query; nodes retry queries above the limit (0: no limit)",
	)
	f.StringVar(&etcd, "etcd", "", "endpoints of an etcd cluster, instead of the embedded one")
	f.StringVar(&c.Etcd.CA, "etcd-ca", "", "file with the CA certificate of that etcd")
	f.StringVar(&c.Etcd.Cert, "etcd-cert", "", "file with the client certificate for that etcd")
	f.StringVar(&c.Etcd.Key, "etcd-key", "", "file with the key of the client certificate")
	f.StringVar(
		&base,
		"base-prefix",
		"",
		fmt.Sprintf("prefix that node /64s are allocated from, fixed at the first start (default %v)", plan.Base),
	)
	f.StringVar(
		&private,
		"private-prefix",
		"",
		fmt.Sprintf("prefix of the addresses that containers see, fixed at the first start (default %v)", plan.Private),
	)
	f.StringSliceVar(
		&gateways,
		"gateway-prefix",
		nil,
		fmt.Sprintf(
			"prefixes of virtual addresses, one of each family; each node with tenants of network %s gets a "+
				"/%d and a /%d; fixed at the first start (default %v,%v)",
			tenant.NetworksWith(tenant.NorthSouth),
			address.GatewayBits4,
			address.GatewayBits6,
			plan.Gateway4,
			plan.Gateway6,
		),
	)
	f.StringVar(
		&egress,
		"egress-prefix",
		"",
		"prefix, routed from outside, in which each node has a /64 for the addresses at which hosts outside see "+
			"containers of network "+tenant.NetworksWith(tenant.Egress)+"; /8 to /64; fixed once it is set (default "+
			"the /64s of nodes)",
	)
	bindEVPN(f, &evpn)
	bindBGP(f, &services)
	return cmd
}

// gatewayFlag sets the gateway prefixes of the plan, one per family.
func gatewayFlag(texts []string, plan *address.Plan) error {
	for _, text := range texts {
		prefix, err := prefixFlag("--gateway-prefix", text)
		if err != nil {
			return err
		}
		to := &plan.Gateway6
		if prefix.Addr().Is4() {
			to = &plan.Gateway4
		}
		if to.IsValid() {
			return usage("--gateway-prefix %v and %v have the same address family; use one of each", *to, prefix)
		}
		*to = prefix
	}
	return nil
}

// prefixFlag parses a prefix. It returns the zero Prefix for an empty text.
func prefixFlag(name, text string) (netip.Prefix, error) {
	if text == "" {
		return netip.Prefix{}, nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return p, usage("%s %q is not a prefix such as fd70:696c:6100::/40", name, text)
	}
	return p, nil
}
