package agent

import (
	"context"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/endpoint"
)

// What only tests of this package call.

var (
	ExplainUnderlayServices = explainUnderlayServices
	RetryPause              = retryPause
)

func (c *Core) ForgetIndexes() error { return c.forgetIndexes() }

func (c *Core) Created() []endpoint.Record { return c.created() }

func (c *Core) Migrated() map[endpoint.ID]bool { return c.migrated }

func (c *Core) MigrateAll(ctx context.Context) bool { return c.migrateAll(ctx) }

func (c *Core) MigrationDue() <-chan struct{} { return c.migrationDue }

func (c *Core) PolicyProblems() []string { return c.policyProblems() }

func (c *Core) SignalMigration(r endpoint.Record) { c.signalMigration(r) }

func (c *Core) TransitProblems() []string { return c.transitProblems() }

func (c *Core) OffloadProblems() []string { return c.offloadProblems() }

func (t *Tenants) SetContainers(of func(tenant string) []*pilasterv1.OffloadedEndpoint) {
	t.containers = of
}

func (t *Tenants) Endpoints(name string) int { return t.endpoints(name) }

func (t *Tenants) MarkResolving(name string) func() { return t.markResolving(name) }

func (t *Tenants) MigrationProblems() []string { return t.migrationProblems() }

func (t *Tenants) Needed(name string) bool { return t.needed(name) }

func (t *Tenants) NoteRefused(name string, err error) { t.noteRefused(name, err) }

func (t *Tenants) Path(name string) string { return t.path(name) }

func (t *Tenants) RefusedProblems() []string { return t.refusedProblems() }
