package cli

import (
	"github.com/spf13/cobra"

	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/bench/suites"
)

func newBenchOncacheCommand(env Env) *cobra.Command {
	var flags pathFlags
	var form func() string
	forms := map[string]func() bench.Options{
		"quick": suites.QuickOncache, "full": suites.FullOncache, "smoke": suites.SmokeOncache,
	}
	known := suites.FullOncache()
	c := &cobra.Command{
		Use:   "oncache",
		Short: "Compare VXLAN overlays with and without the cache of ONCache's design",
		Long: `Compare VXLAN overlays without and with the cache for them: kernel VXLAN, our own network with VXLAN, and
what peers build, such as Flannel. All are measured in one run, in turn and in random order: transactions of TCP, UDP
and memcached, short connections, streams, and the CPU time of each. The report has the figures of the ONCache talk
beside ours. A peer NAME-oncache is compared with the peer NAME, every other peer with vxlan.

With --full the command fails if a cached overlay does not reach, relative to the same overlay without the cache, 1.36
in TCP_RR, 1.34 in UDP_RR, and in TCP_CRR and streams 1.00 (the end of the interval; median 0.95), or takes more than
0.74 of the CPU time of a TCP_RR or UDP_RR transaction. TCP_CRR gains little, because the first and last packets of each
connection pass the overlay, and the programs look at all of them. The limits of --quick are lower,
--smoke has none. memcached must be installed, or excluded with --metrics. Run it on an idle machine.
docs/results/oncache.md explains the figures.

` + namesOf(known.Scenarios, known.Metrics),
		Example: `  pilaster bench oncache --quick -o results
  pilaster bench oncache --full -o json
  pilaster bench oncache --full --peer flannel=./flannel.sh --peer flannel-oncache=./flannel-oncache.sh
  pilaster bench oncache --metrics TCP_RR,UDP_RR --scenarios native,vxlan,oncache`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			o := forms[form()]()
			if err := flags.apply(&o, known); err != nil {
				return err
			}
			suites.ComparePeers(&o)
			return flags.measure(c.Context(), env, o)
		},
	}
	form = bindForms(c,
		formFlag{"quick", "two minutes: fewer rounds, without vxlan-tuned and oncache-no-headroom (default)"},
		formFlag{"full", "ten minutes: everything"},
		formFlag{"smoke", smokeForm})
	flags.bind(c, known)
	return c
}

func newBenchEgressCommand(env Env) *cobra.Command {
	known := suites.FullEgress()
	return newPathsCommand(env, known, map[string]func() bench.Options{
		"quick": suites.QuickEgress, "full": suites.FullEgress, "smoke": suites.SmokeEgress,
	}, cobra.Command{
		Use:   "egress",
		Short: "Compare egress and egress gateways with traffic between containers, and with ip6tables",
		Long: `Compare containers that talk to a host outside of the cluster, directly and by an egress gateway, with
containers that talk to each other over the same link, and with what the kernel has for it on the same topology: routed
containers behind NPTv6 (ip6tables SNPT and DNPT) and behind MASQUERADE on a second node. All are measured in one run,
in turn and in random order, as "pilaster bench datapath" does.

With --quick and --full the command fails if egress does not reach 0.97 of the TCP_RR between containers, and the
TCP_CRR of a tenant with policies, or an egress gateway not the TCP_RR and TCP_CRR of MASQUERADE, or if the run was too
noisy to decide. --smoke has no limits. ip6tables must be installed. Run it on an idle machine.
docs/results/egress.md explains the figures.

` + namesOf(known.Scenarios, known.Metrics),
		Example: "  pilaster bench egress --quick -o results\n" +
			"  pilaster bench egress --scenarios egress-gateway,egress-masquerade --metrics TCP_CRR",
	})
}

func newBenchServicesCommand(env Env) *cobra.Command {
	known := suites.FullServices()
	return newPathsCommand(env, known, map[string]func() bench.Options{
		"quick": suites.QuickServices, "full": suites.FullServices, "smoke": suites.SmokeServices,
	}, cobra.Command{
		Use:   "services",
		Short: "Compare services with traffic to the backend itself",
		Long: `Compare a container that talks to another one through a service with one that talks to it directly, over
the same link: with the backend chosen when the socket connects, and on the packet path, with one service and with
10,000. All are measured in one run, in turn and in random order, as "pilaster bench datapath" does.

With --quick and --full the command fails if a service whose backend is chosen at connect time does not reach 0.99 of
the TCP_RR and 0.97 of the TCP_CRR of the backend itself, or one on the packet path not 0.95 of the TCP_RR and the
TCP_CRR of a tenant with policies, if 10,000 services are slower than one, or if the run was too noisy to decide.
--smoke has no limits. Run it on an idle machine. docs/results/services.md explains the figures. "make kube-proxy" adds
kube-proxy's rules as peers; then new connections with 10,000 services must reach 1.15 of theirs.

` + namesOf(known.Scenarios, known.Metrics),
		Example: "  pilaster bench services --quick -o results\n" +
			"  pilaster bench services --scenarios service-connect,service-packet --metrics TCP_CRR",
	})
}

// newPathsCommand returns a command that compares packet paths in one of three forms.
func newPathsCommand(
	env Env,
	known bench.Options,
	forms map[string]func() bench.Options,
	c cobra.Command,
) *cobra.Command {
	var flags pathFlags
	form := bindForms(&c,
		formFlag{"quick", "two minutes (default)"},
		formFlag{"full", "five minutes: more rounds"},
		formFlag{"smoke", smokeForm})
	flags.bind(&c, known)
	c.Args = cobra.NoArgs
	c.RunE = func(c *cobra.Command, _ []string) error {
		o := forms[form()]()
		if err := flags.apply(&o, known); err != nil {
			return err
		}
		suites.CompareKubeProxy(&o)
		return flags.measure(c.Context(), env, o)
	}
	return &c
}
