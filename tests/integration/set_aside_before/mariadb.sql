CREATE TABLE `other` (
  `number` bigint(20) NOT NULL,
  `due` bigint(20) NOT NULL,
  `attempt_at` bigint(20) DEFAULT NULL,
  `expires_at` bigint(20) DEFAULT NULL,
  `holder` bigint(20) DEFAULT NULL,
  `failures` int(11) NOT NULL DEFAULT 0,
  `message_id` varchar(250) NOT NULL,
  `destination` varchar(200) NOT NULL,
  `headers` longtext NOT NULL,
  `body` longblob NOT NULL,
  PRIMARY KEY (`number`),
  KEY `attempt` (`attempt_at`,`number`),
  KEY `due` (`due`,`number`,`failures`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_nopad_bin;
CREATE TABLE `postdate_destination_limit` (
  `lane` bigint(20) NOT NULL AUTO_INCREMENT,
  `store` smallint(6) NOT NULL,
  `destination` varchar(200) NOT NULL,
  `limits` text NOT NULL,
  `free_at` bigint(20) NOT NULL,
  PRIMARY KEY (`lane`),
  UNIQUE KEY `destination_limit_name` (`store`,`destination`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_nopad_bin;
CREATE TABLE `postdate_holder` (
  `holder` bigint(20) NOT NULL AUTO_INCREMENT,
  `store_id` smallint(6) NOT NULL,
  `lock_name` varchar(64) NOT NULL,
  `pid` int(11) NOT NULL,
  `machine` varchar(255) NOT NULL,
  `started_at` bigint(20) NOT NULL,
  `ahead` bigint(20) DEFAULT NULL,
  PRIMARY KEY (`holder`)
) ENGINE=InnoDB AUTO_INCREMENT=2 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_nopad_bin;
CREATE TABLE `postdate_migration` (
  `subject` varchar(64) NOT NULL,
  `version` int(11) NOT NULL,
  `name` varchar(100) NOT NULL,
  PRIMARY KEY (`subject`,`version`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_nopad_bin;
INSERT INTO `postdate_migration` VALUES
('',1,'initial'),
('',2,'quarantine'),
('',3,'destination limits'),
('other',1,'initial'),
('other',2,'keys'),
('service.timeouts',1,'initial'),
('service.timeouts',2,'keys');
CREATE TABLE `postdate_quarantine` (
  `number` bigint(20) NOT NULL AUTO_INCREMENT,
  `store_id` smallint(6) NOT NULL,
  `at` bigint(20) NOT NULL,
  `reason` text NOT NULL,
  `message_id` varchar(250) NOT NULL,
  `due` bigint(20) NOT NULL,
  `destination` varchar(200) NOT NULL,
  `expires_at` bigint(20) DEFAULT NULL,
  `failures` int(11) NOT NULL,
  `headers` longtext NOT NULL,
  `body` longblob NOT NULL,
  PRIMARY KEY (`number`),
  KEY `quarantine_store` (`store_id`,`number`)
) ENGINE=InnoDB AUTO_INCREMENT=5 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_nopad_bin;
INSERT INTO `postdate_quarantine` VALUES
(1,1,1769860801000000,'headers must be a JSON object of texts, not \'{torn\': JSON is malformed: object keys must be strings (byte 1)','torn',1769860800000000,'orders',NULL,0,'{torn',0x00746F726E),
(2,1,1769860801000000,'headers must be a JSON object of texts, not \'{torn\': JSON is malformed: object keys must be strings (byte 1)','stored-anew',1769860800000000,'orders',NULL,0,'{torn',0x0073746F7265642D616E6577),
(3,1,1769860801000000,'headers must be a JSON object of texts, not \'{torn\': JSON is malformed: object keys must be strings (byte 1)','delivered-anew',1769860800000000,'orders',NULL,0,'{torn',0x0064656C6976657265642D616E6577),
(4,2,1769860801000000,'headers must be a JSON object of texts, not \'{torn\': JSON is malformed: object keys must be strings (byte 1)','torn',1769860800000000,'orders',NULL,0,'{torn',0x00746F726E);
CREATE TABLE `postdate_record` (
  `number` bigint(20) NOT NULL AUTO_INCREMENT,
  `at` bigint(20) NOT NULL,
  `due` bigint(20) DEFAULT NULL,
  `store_id` smallint(6) NOT NULL,
  `kind` tinyint(4) NOT NULL,
  `once` tinyint(4) DEFAULT NULL,
  `message_id` varchar(250) NOT NULL,
  `destination` varchar(200) DEFAULT NULL,
  `detail` mediumtext DEFAULT NULL,
  PRIMARY KEY (`number`),
  UNIQUE KEY `record_scheduled` (`message_id`,`store_id`,`once`)
) ENGINE=InnoDB AUTO_INCREMENT=14 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_nopad_bin;
INSERT INTO `postdate_record` VALUES
(1,1769860800000000,1769860800000000,1,1,1,'torn','orders',NULL),
(2,1769860800000000,1769860800000000,1,1,1,'stored-anew','orders',NULL),
(3,1769860800000000,1769860800000000,1,1,1,'delivered-anew','orders',NULL),
(4,1769860801000000,1769860800000000,1,7,NULL,'torn','orders','unreadable: headers must be a JSON object of texts, not \'{torn\': JSON is malformed: object keys must be strings (byte 1)'),
(5,1769860801000000,1769860800000000,1,7,NULL,'stored-anew','orders','unreadable: headers must be a JSON object of texts, not \'{torn\': JSON is malformed: object keys must be strings (byte 1)'),
(6,1769860801000000,1769860800000000,1,7,NULL,'delivered-anew','orders','unreadable: headers must be a JSON object of texts, not \'{torn\': JSON is malformed: object keys must be strings (byte 1)'),
(8,1769860800000000,1769860800000000,1,8,NULL,'delivered-anew','orders','came back from the error queue'),
(9,1769860800000000,1769860800000000,1,2,NULL,'delivered-anew','orders',NULL),
(11,1769860800000000,1769860800000000,1,8,NULL,'stored-anew','orders','came back from the error queue'),
(12,1769860800000000,1769860800000000,2,1,1,'torn','orders',NULL),
(13,1769860801000000,1769860800000000,2,7,NULL,'torn','orders','unreadable: headers must be a JSON object of texts, not \'{torn\': JSON is malformed: object keys must be strings (byte 1)');
CREATE TABLE `postdate_store` (
  `store_id` smallint(6) NOT NULL AUTO_INCREMENT,
  `name` varchar(64) NOT NULL,
  PRIMARY KEY (`store_id`),
  UNIQUE KEY `name` (`name`)
) ENGINE=InnoDB AUTO_INCREMENT=3 DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_nopad_bin;
INSERT INTO `postdate_store` VALUES
(2,'other'),
(1,'service.timeouts');
CREATE TABLE `service.timeouts` (
  `number` bigint(20) NOT NULL,
  `due` bigint(20) NOT NULL,
  `attempt_at` bigint(20) DEFAULT NULL,
  `expires_at` bigint(20) DEFAULT NULL,
  `holder` bigint(20) DEFAULT NULL,
  `failures` int(11) NOT NULL DEFAULT 0,
  `message_id` varchar(250) NOT NULL,
  `destination` varchar(200) NOT NULL,
  `headers` longtext NOT NULL,
  `body` longblob NOT NULL,
  PRIMARY KEY (`number`),
  KEY `attempt` (`attempt_at`,`number`),
  KEY `due` (`due`,`number`,`failures`)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_nopad_bin;
INSERT INTO `service.timeouts` VALUES
(2,1769860800000000,1769860800000000,NULL,NULL,0,'stored-anew','orders','{\"kind\":\"new\"}',0x7365636F6E64);
