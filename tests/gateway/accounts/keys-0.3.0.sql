BEGIN TRANSACTION;
CREATE TABLE headway_key_changes (
	one INTEGER NOT NULL, 
	num BIGINT NOT NULL, 
	PRIMARY KEY (one)
);
CREATE TABLE headway_keys (
	sha256 TEXT NOT NULL, 
	name TEXT NOT NULL, 
	team TEXT NOT NULL, 
	weight FLOAT NOT NULL, 
	tier INTEGER NOT NULL, 
	requests_per_minute FLOAT, 
	tokens_per_minute FLOAT, 
	expires TEXT, 
	budget_tokens BIGINT, 
	budget_usd FLOAT, 
	period TEXT NOT NULL, 
	created_ns BIGINT NOT NULL, 
	revoked_ns BIGINT, 
	PRIMARY KEY (sha256)
);
CREATE TABLE headway_teams (
	name TEXT NOT NULL, 
	budget_tokens BIGINT, 
	budget_usd FLOAT, 
	period TEXT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE headway_usage (
	sha256 TEXT NOT NULL, 
	team TEXT NOT NULL, 
	day TEXT NOT NULL, 
	model TEXT NOT NULL, 
	requests BIGINT NOT NULL, 
	input_tokens BIGINT NOT NULL, 
	output_tokens BIGINT NOT NULL, 
	usd FLOAT NOT NULL, 
	PRIMARY KEY (sha256, team, day, model)
);
COMMIT;
