package rpc

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/store"
	"pilaster.io/pilaster/internal/policy"
	"pilaster.io/pilaster/internal/tenant"
)

func (s *OperatorService) ApplyPolicies(
	ctx context.Context,
	req *connect.Request[pilasterv1.ApplyPoliciesRequest],
) (*connect.Response[pilasterv1.ApplyPoliciesResponse], error) {
	policies, err := ReadPolicies(req.Msg.Documents)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	unlock, err := s.applying.Lock(ctx, req.Msg.Tenant)
	if err != nil {
		return nil, connect.NewError(connect.CodeUnavailable, fmt.Errorf("%w; nothing was changed", err))
	}
	defer unlock()
	warnings, err := s.checkPolicies(ctx, req.Msg.Tenant, policies, req.Msg.Force)
	if err != nil {
		return nil, err
	}
	applied, err := s.Store.ApplyPolicies(
		ctx,
		req.Msg.Tenant,
		policies,
		store.Applying{DryRun: req.Msg.DryRun, Force: req.Msg.Force},
	)
	if err != nil {
		return nil, err
	}
	s.await(ctx)
	var resp pilasterv1.ApplyPoliciesResponse
	for i, is := range applied {
		p := brief(policies[i])
		p.Tenant, p.Changed, p.Revision = req.Msg.Tenant, is.Changed, is.Revision
		resp.Policies = append(
			resp.Policies,
			&pilasterv1.AppliedPolicy{Policy: p, Change: is.Change, Warnings: warnings[i]},
		)
	}
	return connect.NewResponse(&resp), nil
}

// checkPolicies refuses policies that nodes could not enforce together with the tenant's other policies, and returns
// warnings for each. If the tenant does not exist, the store refuses later.
func (s *OperatorService) checkPolicies(
	ctx context.Context,
	name string,
	changes []*pilasterv1.Policy,
	force bool,
) (warnings [][]string, err error) {
	all, apps, t := s.Cache.PolicyInputs(name)
	changed, labels := map[string]bool{}, policy.LabelsOf(apps)
	for _, p := range changes {
		read, err := policy.ParseKept(p.Kind, []byte(p.Document))
		if err != nil {
			return nil, connect.NewError(
				connect.CodeInternal,
				fmt.Errorf("%s cannot be parsed in its stored form: %w; nothing was changed", store.PolicyName(p), err),
			)
		}
		if !s.Cache.HasPolicy(name, p) { // existing policies are not checked again
			if err := refuseEncrypted(t, s.Store.Cluster().Plan.Private, &read); err != nil {
				return nil, connect.NewError(connect.CodeInvalidArgument, err)
			}
			all[cache.PolicyNameOf(p)] = read
			changed[read.String()] = true
		}
		var texts []string
		if len(apps) > 0 {
			texts = unmatchedWarnings(labels, &read, name)
		}
		if lacksSpec(p.Document) {
			texts = append(
				texts,
				fmt.Sprintf(
					"it has no spec, so it selects all containers of namespace %s and denies all ingress: delete it "+
						"if that is not intended",
					p.Namespace,
				),
			)
		}
		warnings = append(warnings, texts)
	}
	if len(changed) == 0 {
		return warnings, nil
	}
	room := policy.Room
	if force { // an administrator may have given the nodes more room
		room = math.MaxInt
	}
	err = policy.Fit(
		ctx,
		name,
		slices.Collect(maps.Values(all)),
		func(p *policy.Policy) bool { return changed[p.String()] },
		apps,
		t.PolicyAtReceiver(),
		room,
	)
	if err != nil {
		return nil, connect.NewError(
			connect.CodeResourceExhausted,
			fmt.Errorf("nodes with default capacities could not enforce them: %w; nothing was changed", err),
		)
	}
	return warnings, nil
}

// unmatchedWarnings warns of labels, values of labels, and named ports that no container of the tenant has.
func unmatchedWarnings(labels policy.Labels, p *policy.Policy, tenant string) (texts []string) {
	for _, c := range []struct {
		found []string
		text  string
	}{
		{
			labels.Unmatched(p),
			"it selects by %s, which no container of tenant %s has: such a selector matches no container " +
				"(DoesNotExist and NotIn match all); docs/reference/policy.md#identity says where labels come " +
				"from. Typo?",
		},
		{
			labels.UnmatchedValues(p),
			"it selects by %s, which no container of tenant %s has: In and matchLabels match no container with such " +
				"a value, and NotIn excludes none (docs/reference/policy.md#identity). Typo?",
		},
		{
			labels.UnmatchedPorts(p),
			"it names port %s, which no container of tenant %s declares: such a port matches no packet until a " +
				"container declares it",
		},
	} {
		if len(c.found) > 0 {
			texts = append(texts, fmt.Sprintf(c.text, strings.Join(c.found, ", "), tenant))
		}
	}
	return texts
}

// lacksSpec reports whether a document has no spec, which Kubernetes allows for a NetworkPolicy.
func lacksSpec(document string) bool {
	var is struct {
		Spec json.RawMessage `json:"spec"`
	}
	return json.Unmarshal([]byte(document), &is) == nil && (len(is.Spec) == 0 || string(is.Spec) == "null")
}

// refuseEncrypted refuses CIDRs in the range of encrypted addresses, which a tenant's containers see. Rules match
// plaintext addresses, and neighbouring encrypted addresses belong to unrelated containers.
func refuseEncrypted(t tenant.Tenant, private netip.Prefix, p *policy.Policy) error {
	if t.Addressing != tenant.Encrypted {
		return nil
	}
	for _, rules := range p.Rules {
		for _, r := range rules {
			for _, b := range r.Blocks {
				for _, prefix := range append([]netip.Prefix{b.Prefix}, b.Except...) {
					if prefix.Bits() >= private.Bits() && private.Contains(prefix.Addr()) {
						return fmt.Errorf(
							"%s: %v is among the encrypted addresses that containers of tenant %s see, and CIDRs are "+
								"compared with plaintext addresses: select containers by labels, or use the plaintext "+
								"addresses that `pilaster explain` shows; nothing was changed",
							p,
							prefix,
							t.Name,
						)
					}
				}
			}
		}
	}
	return nil
}

// brief returns a policy without its document.
func brief(p *pilasterv1.Policy) *pilasterv1.Policy {
	return &pilasterv1.Policy{
		Tenant:    p.Tenant,
		Kind:      p.Kind,
		Namespace: p.Namespace,
		Name:      p.Name,
		Audit:     p.Audit,
		Rules:     p.Rules,
		Changed:   p.Changed,
		Revision:  p.Revision,
	}
}

func (s *OperatorService) ListPolicies(
	_ context.Context,
	req *connect.Request[pilasterv1.ListPoliciesRequest],
) (*connect.Response[pilasterv1.ListPoliciesResponse], error) {
	tenants, err := s.tenants(req.Msg.Tenant)
	if err != nil {
		return nil, err
	}
	var resp pilasterv1.ListPoliciesResponse
	for _, t := range tenants {
		for _, p := range s.Cache.PoliciesOf(t.Name) {
			resp.Policies = append(resp.Policies, brief(p))
		}
		resp.Unenforced = append(resp.Unenforced, s.Cache.Unenforced(t.Name)...)
	}
	return connect.NewResponse(&resp), nil
}

func (s *OperatorService) GetPolicy(
	_ context.Context,
	req *connect.Request[pilasterv1.GetPolicyRequest],
) (*connect.Response[pilasterv1.GetPolicyResponse], error) {
	wanted := req.Msg.GetPolicy()
	if _, _, _, err := s.tenant(wanted.GetTenant()); err != nil {
		return nil, err
	}
	s.Cache.Mu.RLock()
	found := s.Cache.Policies.Of[wanted.Tenant][cache.PolicyNameOf(wanted)]
	s.Cache.Mu.RUnlock()
	if found == nil {
		return nil, connect.NewError(
			connect.CodeNotFound,
			fmt.Errorf(
				"tenant %s has no policy %.300s; `pilaster policy list --tenant %s` lists its policies",
				wanted.Tenant,
				store.PolicyName(wanted),
				wanted.Tenant,
			),
		)
	}
	return connect.NewResponse(&pilasterv1.GetPolicyResponse{Policy: found}), nil
}

func (s *OperatorService) DeletePolicies(
	ctx context.Context,
	req *connect.Request[pilasterv1.DeletePoliciesRequest],
) (*connect.Response[pilasterv1.DeletePoliciesResponse], error) {
	wanted := req.Msg.Policies
	switch {
	case (len(wanted) > 0) == (len(req.Msg.Documents) > 0):
		return nil, connect.NewError(
			connect.CodeInvalidArgument,
			fmt.Errorf("select the policies either by name or by documents; nothing was changed"),
		)
	case len(wanted) == 0:
		var err error
		if wanted, err = ReadPolicies(req.Msg.Documents); err != nil {
			return nil, connect.NewError(connect.CodeInvalidArgument, err)
		}
	}
	if err := s.Store.DeletePolicies(ctx, req.Msg.Tenant, wanted); err != nil {
		return nil, err
	}
	s.await(ctx)
	var resp pilasterv1.DeletePoliciesResponse
	for _, p := range wanted {
		resp.Policies = append(
			resp.Policies,
			&pilasterv1.Policy{Tenant: req.Msg.Tenant, Kind: p.Kind, Namespace: p.Namespace, Name: p.Name},
		)
	}
	return connect.NewResponse(&resp), nil
}
