package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/tenant"
)

// policyView is a policy as JSON.
type policyView struct {
	Tenant    string     `json:"tenant"`
	Kind      string     `json:"kind"`
	Namespace string     `json:"namespace,omitempty"`
	Name      string     `json:"name"`
	Audit     bool       `json:"audit"`
	Rules     uint32     `json:"rules"`
	Changed   *time.Time `json:"changed,omitempty"`
	Revision  int64      `json:"revision,omitempty"` // of the store at the last change
	Change    string     `json:"change,omitempty"`   // of policy apply: created, configured, unchanged, deleted
	DryRun    bool       `json:"dryRun,omitempty"`
	Warnings  []string   `json:"warnings,omitempty"`
}

func viewPolicy(p *pilasterv1.Policy) policyView {
	v := policyView{
		Tenant:    p.GetTenant(),
		Kind:      p.GetKind(),
		Namespace: p.GetNamespace(),
		Name:      p.GetName(),
		Audit:     p.GetAudit(),
		Rules:     p.GetRules(),
		Revision:  p.GetRevision(),
	}
	if p.GetChanged() != nil {
		changed := p.Changed.AsTime()
		v.Changed = &changed
	}
	return v
}

// policyKinds has the words that stand for each kind in names of policies. The first word is the kind in lower case.
var policyKinds = []struct {
	kind       string
	words      []string
	namespaced bool
}{
	{"NetworkPolicy", []string{"networkpolicy", "netpol"}, true},
	{"ClusterNetworkPolicy", []string{"clusternetworkpolicy", "cnp"}, false},
}

// policyNamed parses the name of a policy, in the form in which lists and errors print it.
func policyNamed(text string) (*pilasterv1.Policy, error) {
	words := strings.Split(text, "/")
	isKind := false
	for _, k := range policyKinds {
		isKind = isKind || slices.Contains(k.words, words[0])
		switch is := slices.Contains(k.words, words[0]); {
		case is && len(words) == 2 && k.namespaced:
			return &pilasterv1.Policy{Kind: k.kind, Namespace: tenant.DefaultNamespace, Name: words[1]}, nil
		case is && len(words) == 2:
			return &pilasterv1.Policy{Kind: k.kind, Name: words[1]}, nil
		case is && len(words) == 3 && k.namespaced:
			return &pilasterv1.Policy{Kind: k.kind, Namespace: words[1], Name: words[2]}, nil
		}
	}
	if !isKind && len(words) == 2 && words[0] != "" && words[1] != "" {
		return &pilasterv1.Policy{Kind: "NetworkPolicy", Namespace: words[0], Name: words[1]}, nil
	}
	return nil, usage(
		"%.100q is not a policy name: use networkpolicy/NAMESPACE/NAME or NAMESPACE/NAME, networkpolicy/NAME of "+
			"namespace default, or clusternetworkpolicy/NAME",
		text,
	)
}

func newPolicyCommand(env Env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Manage the network policies of tenants",
		Long: `Manage the network policies of tenants, as Kubernetes documents: NetworkPolicy of networking.k8s.io/v1
and ClusterNetworkPolicy of policy.networking.k8s.io/v1alpha2. The annotation pilaster.io/audit: "true"
puts a policy in audit mode: packets that it would drop are counted and not dropped.`,
		Example: "  pilaster policy apply -f web.yaml --tenant blue\n  pilaster policy list",
		Args:    cobra.NoArgs,
	}
	cmd.AddCommand(newPolicyApply(env), newPolicyList(env), newPolicyGet(env), newPolicyDelete(env), newPolicyHits(env))
	return cmd
}

func newPolicyApply(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var files documentFiles
	var tenant string
	var dryRun, force, prune bool
	cmd := &cobra.Command{
		Use:   "apply",
		Short: "Create or change policies: all in the files, or none",
		Long: `Create or change policies. If one policy is invalid, or the tenant would have too many, nothing is
changed. Unchanged policies cause no update of the nodes. Policies that are not in the files stay.

With --prune, the command then deletes every other policy of the tenant, in all namespaces, and prints
their names. --prune --dry-run prints them and deletes nothing. The files must therefore contain all
policies of the tenant.

The command refuses the first policy of a tenant that is not in audit mode while some nodes that host
the tenant would not enforce it, and names these nodes: nodes with builds without policy support, where
all packets would pass, and nodes where Open vSwitch forwards the tenant's packets, which would isolate
the tenant's containers. After the first policy, such nodes get no containers of the tenant. The command
also refuses policies that need more table entries than a node has. --force applies the policies in both
cases.`,
		Example: "  pilaster policy apply -f web.yaml --tenant blue\n  pilaster policy apply -f web.yaml -f db.yaml " +
			"--tenant blue --dry-run\n  pilaster policy apply -f all.yaml --tenant blue --prune\n" +
			"  kubectl get networkpolicy -A -o yaml | pilaster policy apply -f - --tenant " +
			"blue",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			documents, err := files.read(env)
			if err != nil {
				return err
			}
			resp, err := socket.client().
				ApplyPolicies(cmd.Context(),
					connect.NewRequest(&pilasterv1.ApplyPoliciesRequest{Tenant: tenant, Documents: documents,
						DryRun: dryRun, Force: force}))
			if err != nil {
				return files.named(err)
			}
			views, names := []policyView{}, []string{}
			for _, p := range resp.Msg.Policies {
				v := viewPolicy(p.Policy)
				names = append(names, store.PolicyName(p.Policy))
				v.Change, v.DryRun, v.Warnings = strings.ToLower(
					strings.TrimPrefix(p.Change.String(), "POLICY_CHANGE_"),
				), dryRun, p.Warnings
				views = append(views, v)
				for _, warning := range p.Warnings {
					fmt.Fprintf(env.Stderr, "warning: %s: %s\n", store.PolicyName(p.Policy), warning)
				}
			}
			if prune {
				pruned, err := prunePolicies(cmd.Context(), &socket, tenant, dryRun, names)
				if err != nil {
					return err
				}
				for _, p := range pruned {
					v := viewPolicy(p)
					v.Change, v.DryRun = "deleted", dryRun
					views, names = append(views, v), append(names, store.PolicyName(p))
				}
			}
			return out.print(env.Stdout, views, func(w io.Writer) {
				for i, v := range views {
					change := v.Change
					if dryRun {
						change += " (dry run)"
					}
					fmt.Fprintf(w, "%s %s\n", names[i], change)
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	files.bind(
		cmd,
		"file with policies in YAML or JSON; \"---\" lines separate documents; - is standard input; may be repeated",
	)
	_ = cmd.MarkFlagRequired("filename")
	namedFlag(cmd, &tenant, "tenant", "tenant of the policies", socket.tenants)
	_ = cmd.MarkFlagRequired("tenant")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print what would change, and change nothing")
	cmd.Flags().BoolVar(&prune, "prune", false, "then delete the tenant's policies that are not in the files")
	cmd.Flags().
		BoolVar(&force, "force", false, "also if some nodes that host the tenant would not enforce the policies, or "+
			"the policies need more table entries than a node has")
	return cmd
}

// prunePolicies deletes the policies of a tenant except those with a name to keep, and returns the deleted ones.
func prunePolicies(
	ctx context.Context,
	socket *orchestratorSocket,
	tenant string,
	dryRun bool,
	keep []string,
) (pruned []*pilasterv1.Policy, err error) {
	client := socket.client()
	listed, err := client.ListPolicies(ctx, connect.NewRequest(&pilasterv1.ListPoliciesRequest{Tenant: tenant}))
	if err == nil {
		for _, p := range listed.Msg.Policies {
			if !slices.Contains(keep, store.PolicyName(p)) {
				p.Document = ""
				pruned = append(pruned, p)
			}
		}
		if !dryRun && len(pruned) > 0 {
			_, err = client.DeletePolicies(ctx,
				connect.NewRequest(&pilasterv1.DeletePoliciesRequest{Tenant: tenant, Policies: pruned}))
		}
	}
	if err != nil && !dryRun {
		return nil, fmt.Errorf("%w\n  the policies of the files were applied, and none was deleted: repeat the command",
			err)
	}
	return pruned, err
}

// policyMode is the mode of a policy, in text and JSON.
func policyMode(audit bool) string {
	if audit {
		return "audit"
	}
	return "enforce"
}

func newPolicyList(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant string
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "Show policies",
		Example: "  pilaster policy list\n  pilaster policy list --tenant blue -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			resp, err := socket.client().
				ListPolicies(cmd.Context(), connect.NewRequest(&pilasterv1.ListPoliciesRequest{Tenant: tenant}))
			if err != nil {
				return err
			}
			views := []policyView{}
			for _, p := range resp.Msg.Policies {
				views = append(views, viewPolicy(p))
			}
			for _, h := range resp.Msg.Unenforced {
				fmt.Fprintf(
					env.Stderr,
					"warning: tenant %s: node %s does not enforce the current policies (it enforces the previous "+
						"ones, or isolates the containers) and adds no container of the tenant: %s\n",
					h.Tenant,
					h.Node,
					h.Unenforced,
				)
			}
			return out.print(env.Stdout, views, func(w io.Writer) {
				fmt.Fprintln(w, "TENANT\tNAME\tMODE\tRULES\tCHANGED")
				for i, v := range views {
					fmt.Fprintf(
						w,
						"%s\t%s\t%s\t%d\t%s\n",
						v.Tenant,
						store.PolicyName(resp.Msg.Policies[i]),
						policyMode(v.Audit),
						v.Rules,
						moment(*v.Changed),
					)
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	namedFlag(cmd, &tenant, "tenant", "show only this tenant", socket.tenants)
	return cmd
}

func newPolicyGet(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var tenant string
	cmd := &cobra.Command{
		Use:   "get NAME",
		Short: "Show a policy",
		Long: `Show a policy. -o yaml and -o json print the document, which can be applied again.

NAME is the name in lists: networkpolicy/NAMESPACE/NAME, networkpolicy/NAME for namespace default, or
clusternetworkpolicy/NAME. The short forms of the kinds are netpol and cnp. NAMESPACE/NAME is a
NetworkPolicy.`,
		Example: "  pilaster policy get networkpolicy/shop/web --tenant blue\n  pilaster policy get shop/web " +
			"--tenant blue -o yaml",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			wanted, err := policyNamed(args[0])
			if err != nil {
				return err
			}
			wanted.Tenant = tenant
			resp, err := socket.client().
				GetPolicy(cmd.Context(), connect.NewRequest(&pilasterv1.GetPolicyRequest{Policy: wanted}))
			if err != nil {
				return err
			}
			p := resp.Msg.Policy
			document, err := yaml.JSONToYAML([]byte(p.Document))
			if err != nil {
				return fmt.Errorf("the document of %s is not readable: %w", args[0], err)
			}
			if out.format == "yaml" {
				_, err := env.Stdout.Write(document)
				return err
			}
			return out.print(env.Stdout, json.RawMessage(p.Document), func(w io.Writer) {
				v := viewPolicy(p)
				fmt.Fprintf(
					w,
					"tenant\t%s\nkind\t%s\nnamespace\t%s\nname\t%s\nmode\t%s\nrules\t%d\nchanged\t%s\nrevision\t%d\n\n%s",
					v.Tenant,
					v.Kind,
					cmp.Or(v.Namespace, "-"),
					v.Name,
					policyMode(v.Audit),
					v.Rules,
					moment(*v.Changed),
					v.Revision,
					document,
				)
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd, "yaml")
	namedFlag(cmd, &tenant, "tenant", "tenant of the policy", socket.tenants)
	_ = cmd.MarkFlagRequired("tenant")
	cmd.ValidArgsFunction = names(func(ctx context.Context) ([]string, error) { return socket.policies(ctx, tenant) })
	return cmd
}

func newPolicyDelete(env Env) *cobra.Command {
	var socket orchestratorSocket
	var out output
	var files documentFiles
	var tenant string
	var all bool
	cmd := &cobra.Command{
		Use:   "delete [NAME... | --all]",
		Short: "Delete policies: all that are named, or none",
		Long: `Delete policies. If one cannot be deleted, nothing is changed. A container that no policy selects any
longer can communicate with all containers of its tenant again, and with the addresses outside that it
can reach.

NAME is the same as for "pilaster policy get". With -f, the command deletes the policies that the files
name and ignores the rest of their content. With --all, it deletes every policy that the tenant has at
that moment.`,
		Example: "  pilaster policy delete networkpolicy/shop/web clusternetworkpolicy/base --tenant blue\n  " +
			"pilaster policy delete -f web.yaml --tenant blue\n  pilaster policy delete --all --tenant blue",
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			ways := 0
			for _, given := range []bool{len(args) > 0, len(files.names) > 0, all} {
				if given {
					ways++
				}
			}
			if ways != 1 {
				return usage("name the policies, or use -f with the files that they were applied from, or --all; " +
					"nothing was changed")
			}
			req := &pilasterv1.DeletePoliciesRequest{Tenant: tenant}
			if all {
				listed, err := socket.client().ListPolicies(cmd.Context(),
					connect.NewRequest(&pilasterv1.ListPoliciesRequest{Tenant: tenant}))
				if err != nil {
					return err
				}
				for _, p := range listed.Msg.Policies {
					p.Document = ""
					req.Policies = append(req.Policies, p)
				}
				if len(req.Policies) == 0 {
					return out.print(env.Stdout, []goneView{}, func(w io.Writer) {
						fmt.Fprintf(w, "tenant %s has no policies\n", tenant)
					})
				}
			}
			for _, arg := range args {
				p, err := policyNamed(arg)
				if err != nil {
					return err
				}
				req.Policies = append(req.Policies, p)
			}
			if len(files.names) > 0 {
				var err error
				if req.Documents, err = files.read(env); err != nil {
					return err
				}
			}
			resp, err := socket.client().DeletePolicies(cmd.Context(), connect.NewRequest(req))
			if err != nil {
				return files.named(err)
			}
			gone := []goneView{}
			for _, p := range resp.Msg.Policies {
				gone = append(gone, goneView{p.Tenant, p.Kind, p.Namespace, p.Name})
			}
			return out.print(env.Stdout, gone, func(w io.Writer) {
				for _, p := range resp.Msg.Policies {
					fmt.Fprintf(w, "%s deleted\n", store.PolicyName(p))
				}
			})
		},
	}
	socket.bind(cmd)
	out.bind(cmd)
	files.bind(cmd, "file with the policies to delete, as for policy apply")
	cmd.Flags().BoolVar(&all, "all", false, "delete all policies of the tenant")
	namedFlag(cmd, &tenant, "tenant", "tenant of the policies", socket.tenants)
	_ = cmd.MarkFlagRequired("tenant")
	cmd.ValidArgsFunction = func(c *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		all, directive := names(
			func(ctx context.Context) ([]string, error) { return socket.policies(ctx, tenant) },
		)(
			c,
			nil,
			typed,
		)
		return slices.DeleteFunc(all, func(name string) bool { return slices.Contains(args, name) }), directive
	}
	return cmd
}

// goneView is a deleted policy as JSON.
type goneView struct {
	Tenant    string `json:"tenant"`
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
}
